"""Linear maps in float32 arithmetic: weights of F32, F16 and BF16, and any packed type when exact results are asked for.

For every (weight row, activation row) pair one vector of sixteen chains runs over k, lane i taking k = i mod 16, and the lanes
are added as a fixed tree: the same order in every tile, so that a row gives the same bits in any batch. Packed weight rows
are first dequantised, once for all activation rows of the chunk, into scratch memory.
"""

from __future__ import annotations

from quarrel.cpu_backend.abi import Fields, KernelDef
from quarrel.cpu_backend.dequant import dequantize_row, load_float
from quarrel.cpu_backend.epilogue import EPILOGUE_FIELDS, finish_one
from quarrel.cpu_backend.features import Level
from quarrel.cpu_backend.formats import BLOCKS
from quarrel.cpu_backend.ir import F32, Kernel, Val
from quarrel.cpu_backend.vector import F32x16, sum_lanes

ROWS = 16
"""Weight rows of a chunk when there are many activation rows, and at most when packed rows are dequantised first."""
T_BLOCK = 512


def _tile(
    k: Kernel, level: Level, name: str, a: Fields, row_at: list[Val], ns: list[Val], ts: list[Val], tail: bool
) -> None:
    """Computes and stores y for every weight row and activation row given."""
    xs = [a.x + t * (a.k << 2) for t in ts]
    acc = [[k.var(k.zero(F32x16)) for _ in ts] for _ in row_at]

    def step(load_w, load_x) -> None:
        w = [load_w(row) for row in row_at]
        for j, x_row in enumerate(xs):
            x = load_x(x_row)
            for i in range(len(row_at)):
                acc[i][j].v = k.fma(w[i], x, acc[i][j].v)

    whole = a.k & -16
    with k.range(0, whole, 16) as i:
        at = i << 2
        step(lambda row: load_float(k, level, name, row, at, 16), lambda x: k.load(x + at, F32x16))
    if tail:
        rest = a.k - whole

        def padded(load) -> Val:
            buffer = k.stack(64)
            k.store(k.zero(F32x16), buffer)
            with k.range(0, rest) as i:
                k.store(load(whole + i << 2), buffer + (i << 2))
            return k.load(buffer, F32x16)

        step(
            lambda row: padded(lambda o: load_float(k, level, name, row, o, 1)),
            lambda x: padded(lambda o: k.load(x + o, F32)),
        )
    for i, n in enumerate(ns):
        for j, t in enumerate(ts):
            finish_one(k, a, sum_lanes(acc[i][j].v), n, t)


def float_linear(name: str, level: Level, k_in: int) -> KernelDef:
    """Chunk c: weight rows [chunk_rows * (c % n_tiles), ...) for activation rows [T_BLOCK * (c // n_tiles), ...)."""
    exact = name in BLOCKS
    row_bytes = 4 * -(-k_in // 256) * 256
    tail = k_in % 16 != 0
    row_tile, wide = (4, 6) if level.registers >= 32 else (2, 2)

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        first = chunk % a.n_tiles * a.chunk_rows
        stop_n = k.minimum(first + a.chunk_rows, a.n)
        base, size, kind = a.w, a.row_bytes, name
        if exact:
            with k.range(first, stop_n) as n:
                row, out = a.w + n * a.row_bytes, scratch + (n - first) * row_bytes
                dequantize_row(k, level, name, row, out, a.k, tail=k_in % 256 != 0)
            base, size, kind = scratch - first * row_bytes, k.i64(row_bytes), "F32"
        start = chunk // a.n_tiles * T_BLOCK
        t, stop = k.var(start), k.minimum(start + T_BLOCK, a.live_rows)

        def all_rows(ts: list[Val]) -> None:
            n = k.var(first)
            with k.loop_while(lambda: n.v + row_tile <= stop_n):
                ns = [n.v + i for i in range(row_tile)]
                _tile(k, level, kind, a, [base + i * size for i in ns], ns, ts, tail)
                n.v = n.v + row_tile
            with k.loop_while(lambda: n.v < stop_n):
                _tile(k, level, kind, a, [base + n.v * size], [n.v], ts, tail)
                n.v = n.v + 1

        for width in (wide, 1):
            with k.loop_while(lambda: t.v + width <= stop):  # noqa: B023
                all_rows([t.v + i for i in range(width)])
                t.v = t.v + width

    fields = ("live_rows", "x", "w", "n", "k", "row_bytes", "n_tiles", "chunk_rows", *EPILOGUE_FIELDS)
    marks = f"{'/tail' if tail else ''}{f'/{k_in}' if exact else ''}"
    return KernelDef(f"float_linear/{name}{marks}", fields, body, ROWS * row_bytes + 1024 if exact else 0)
