"""Linear maps in float32 arithmetic: F32, F16 and BF16 weights, and any block format where exact results are requested.

For every (weight row, activation row) pair one vector of sixteen chains runs over k, lane i taking k = i mod 16, and the
lanes are added as a fixed tree: the same order in every tile, so that a row gives the same bits in any batch. Packed weight
rows are first dequantised, once for all activation rows of the chunk, into scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from quarrel.cpu_backend.formats.dequantize import FLOATS, dequantize_row, load_float
from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.linear.activations import padded
from quarrel.cpu_backend.linear.epilogue import OUTPUT_FIELDS, Output
from quarrel.cpu_backend.linear.matvec import Rows
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, Kernel, Val, Var, vec
from quarrel.cpu_backend.runtime.vector import F32x16, sum_lanes

ROWS = 16
"""Weight rows of a chunk when there are many activation rows, and at most when packed rows are dequantised first."""
T_BLOCK = 512
CHUNK_BYTES = 32768
"""Weight bytes of the shortest chunk of the decode path: about 3 us of one core's share of memory bandwidth."""
BLOCK = 24
"""Weight rows that meet a few activation rows together."""
PASS = 768
"""Values of a row that a block's tiles read one after another, each in two passes."""
AHEAD = 8192
"""Bytes, at least, that a single activation row's weights are prefetched ahead of their use."""
SHORT = 1024
"""Rows of fewer values follow one another fast enough to be read one at a time, which is one run of memory. One thread of a
Zen 3 that reads 15 GB/s read F16 rows of 576, 1536, 2880 and 4096 values at 9.7, 10.1, 11.5 and 13.1 GB/s in twos without
prefetches; with them at 13.4, 13.0, 12.4 and 12.5 one at a time, and 10.9, 14.0, 13.0 and 14.8 in fours."""


@dataclass(frozen=True)
class FloatMatrix:
    """Unpacked weight rows of `kind`: row i at base + i * size, of `k` values."""

    base: Val
    size: Val
    kind: str
    k: Val
    single: int
    """Rows that are computed side by side for a single activation row."""


def chain_lanes(level: Level, weights: int, rows: int) -> int:
    """Lanes of the chains that are computed at once: half of them, in two passes, where all would not fit the registers."""
    return 8 if level.registers < 32 and weights * rows > 6 else 16


@dataclass(frozen=True)
class _Chains:
    """Lanes start .. start + lanes - 1 of the chains of all pairs of rows."""

    m: FloatMatrix
    row_at: list[Val]
    xs: list[Val]
    start: int
    lanes: int
    acc: list[list[Var]]

    def sixteen(self, k: Kernel, level: Level, i: Val) -> None:
        """Adds the products of values i .. i + 15."""
        at, lanes = (i + self.start if self.start else i) << 2, self.lanes
        load_w = lambda row: load_float(k, level, self.m.kind, row, at, lanes)  # noqa: E731
        self._add(k, load_w, lambda x: k.load(x + at, vec(F32, lanes)))

    def rest(self, k: Kernel, level: Level) -> None:
        """Adds the last, incomplete sixteen, with zeros behind them."""
        whole = self.m.k & -16

        def padded(load: Callable[[Val], Val]) -> Val:
            buffer = k.stack(64)
            k.store(k.zero(F32x16), buffer)
            with k.range(whole, self.m.k) as i:
                k.store(load(i << 2), buffer + (i - whole << 2))
            return k.load(buffer, vec(F32, self.lanes), 4 * self.start)

        self._add(
            k,
            lambda row: padded(lambda o: load_float(k, level, self.m.kind, row, o, 1)),
            lambda x: padded(lambda o: k.load(x + o, F32)),
        )

    def _add(self, k: Kernel, load_w: Callable[[Val], Val], load_x: Callable[[Val], Val]) -> None:
        w = [load_w(row) for row in self.row_at]
        for j, x_row in enumerate(self.xs):
            x = load_x(x_row)
            for w_row, sums in zip(w, self.acc, strict=True):
                sums[j].v = k.fma(w_row, x, sums[j].v)


def _tile(k: Kernel, level: Level, m: FloatMatrix, ns: list[Val], xs: list[Val], tail: bool) -> list[list[Val]]:
    """Results for every weight row in ns and activation row address in xs, all lanes of their chains in registers."""
    row_at = [m.base + n * m.size for n in ns]
    chains = _Chains(m, row_at, xs, 0, 16, [[k.var(k.zero(F32x16)) for _ in xs] for _ in row_at])
    whole, done = m.k & -16, k.i64(0)
    if len(xs) == 1:  # bound by memory: whole lines, asked for ahead of their use
        value = FLOATS[m.kind]
        line, ahead = 64 // value, _later(k, m, len(row_at), AHEAD)
        done = m.k & -line
        with k.range(0, done, line) as i:
            for row in row_at:
                k.prefetch(row + i * value + ahead)
            for part in range(0, line, 16):
                chains.sixteen(k, level, i + part)
    with k.range(done, whole, 16) as i:
        chains.sixteen(k, level, i)
    if tail:
        chains.rest(k, level)
    return [[sum_lanes(v.v) for v in row] for row in chains.acc]


@dataclass(frozen=True)
class _Block:
    """Chains of up to BLOCK weight rows, from `first` on, and a few activation rows. Their sums lie in memory; for each
    stretch of PASS values those of `height` weight rows come into registers, half of the lanes after the other. So x is in
    the first-level cache for the whole block."""

    m: FloatMatrix
    first: Val
    xs: list[Val]
    height: int
    sums: Val

    def add(self, k: Kernel, level: Level, size: Val, cold: Val) -> None:
        """The products of whole sixteens of values of `size` weight rows, which nobody has read yet if they are cold."""
        whole = self.m.k & -16
        with k.range(0, size * len(self.xs)) as i:
            k.store(k.zero(F32x16), self.sums + (i << 6))
        with k.range(0, whole, PASS) as start:
            stop = k.minimum(start + PASS, whole)
            with k.range(0, size, self.height) as n:
                with k.when(cold):
                    _prefetch(k, self.m, self.first + n, self.height, start, stop)
                for half in range(2):
                    chains = self._chains(k, n, half)
                    with k.range(start, stop, 16) as i:
                        chains.sixteen(k, level, i)
                    for o, v in zip(self._offsets(half), chain.from_iterable(chains.acc), strict=True):
                        k.store(v.v, self.sums + n * (64 * len(self.xs)), o)

    def results(self, k: Kernel, level: Level, n: Val, tail: bool) -> list[list[Val]]:
        """The products of weight rows n .. n + height - 1 with every row of x."""
        low, high = (self._chains(k, n, half) for half in range(2))
        if tail:
            low.rest(k, level)
            high.rest(k, level)
        both = zip(low.acc, high.acc, strict=True)
        return [[sum_lanes(a.v.concat(b.v)) for a, b in zip(*rows, strict=True)] for rows in both]

    def _chains(self, k: Kernel, n: Val, half: int) -> _Chains:
        """Of weight rows n .. n + height - 1, as they stand."""
        width, start = len(self.xs), self.sums + n * (64 * len(self.xs))
        acc = [k.var(k.load(start, vec(F32, 8), o)) for o in self._offsets(half)]
        rows = [self.m.base + (self.first + n + i) * self.m.size for i in range(self.height)]
        by_row = [acc[i * width : (i + 1) * width] for i in range(self.height)]
        return _Chains(self.m, rows, self.xs, 8 * half, 8, by_row)

    def _offsets(self, half: int) -> list[int]:
        """Where half of the lanes of a tile's sums lie."""
        return [64 * pair + 32 * half for pair in range(self.height * len(self.xs))]


def _later(k: Kernel, m: FloatMatrix, count: int, ahead: int) -> Val:
    """How far behind a tile of so many weight rows the first tile lies that is at least `ahead` bytes away."""
    tile = m.size * count
    return (k.i64(ahead - 1) // tile + 1) * tile


def _prefetch(k: Kernel, m: FloatMatrix, n: Val, count: int, start: Val, stop: Val) -> None:
    """Asks for these values of a tile behind that of row n: 80 MB of F16 in rows of 576 values meet two activation rows at
    9 GB/s on a core of a Zen 3, without this at 6; eight rows at 4.8 and 4.3."""
    at, value = m.base + n * m.size + _later(k, m, count, 2 * AHEAD), FLOATS[m.kind]
    with k.range(start, stop, 64 // value) as i:
        for row in range(count):
            k.prefetch(at + row * m.size + i * value, locality=2)


def tiles(level: Level) -> tuple[tuple[int, int], ...]:
    """Weight rows by activation rows that are computed at once, where there are so many activation rows."""
    return ((4, 6), (4, 4), (4, 2)) if level.registers >= 32 else ((3, 4), (2, 2))


def chunk_rows(level: Level, rows: int, row_bytes: int, threads: int) -> int:
    """Weight rows of a chunk of a matrix: whole tiles, eight chunks for each thread if they are CHUNK_BYTES long, and at
    most four times as long or 24 rows. On Zen 3 128 rows of F16 are multiplied at 72 to 77 GFLOP/s a core in chunks of 128
    KB, at 62 in those of 32 KB: each chunk reads x anew."""
    size = max(CHUNK_BYTES, min(max(4 * CHUNK_BYTES, 24 * row_bytes), rows * row_bytes // (8 * threads)))
    step = 4 if level.registers >= 32 else 6
    return max(step, min(256, size // row_bytes) // step * step)


def float_rows(k: Kernel, level: Level, m: FloatMatrix, span: tuple[Val, Val], rows: Rows, out: Output, tail: bool) -> None:
    """Stores the results of the weight rows in the span for the given activation rows."""
    t = k.var(rows.start)

    def store(n: Val, ts: list[Val], results: list[list[Val]]) -> None:
        for i, of_row in enumerate(results):
            for t_j, y in zip(ts, of_row, strict=True):
                out.one(k, y, n + i, rows.target(t_j))

    def tile(n: Val, count: int, ts: list[Val]) -> None:
        ns = [n + i for i in range(count)]
        store(n, ts, _tile(k, level, m, ns, [rows.source(t) for t in ts], tail))

    def block(n: Val, size: Val, height: int, ts: list[Val]) -> None:
        chains = _Block(m, n, [rows.source(t) for t in ts], height, k.stack(64 * BLOCK * len(ts)))
        chains.add(k, level, size, ts[0].eq(rows.start))
        with k.range(0, size, height) as i:
            store(n + i, ts, chains.results(k, level, i, tail))

    for height, width in (*tiles(level), (m.single, 1)):
        with k.loop_while(lambda: t.v + width <= rows.stop):  # noqa: B023
            n, ts = k.var(span[0]), [t.v + i for i in range(width)]
            if chain_lanes(level, height, width) == 8:
                with k.loop_while(lambda: n.v + height <= span[1]):  # noqa: B023
                    size = k.minimum(k.i64(BLOCK), (span[1] - n.v) // height * height)
                    block(n.v, size, height, ts)
                    n.v = n.v + size
            for count in (height, 1) if chain_lanes(level, height, width) == 16 else (1,):
                with k.loop_while(lambda: n.v + count <= span[1]):  # noqa: B023
                    if width > 1 and count > 1:
                        with k.when(t.v.eq(rows.start)):
                            _prefetch(k, m, n.v, count, k.i64(0), m.k)
                    tile(n.v, count, ts)
                    n.v = n.v + count
            t.v = t.v + width


def exact_rows(
    k: Kernel, level: Level, name: str, a: Fields, base: Val, span: tuple[Val, Val], k_in: int, scratch: Val
) -> FloatMatrix:
    """The weight rows in the span as something to compute with: as they are, or dequantised into scratch memory."""
    single = 1 if k_in < SHORT else 4
    if name not in BLOCKS:
        return FloatMatrix(base, a.row_bytes, name, a.k, single)
    size = _dense_bytes(k_in)
    with k.range(*span) as n:
        dequantize_row(k, level, name, base + n * a.row_bytes, scratch + (n - span[0]) * size, a.k, tail=k_in % 256 != 0)
    return FloatMatrix(scratch - span[0] * size, k.i64(size), "F32", a.k, single)


def _dense_bytes(k_in: int) -> int:
    return 4 * padded(k_in)


def exact_scratch(name: str, k_in: int) -> int:
    """Scratch bytes that `exact_rows` needs for ROWS rows."""
    return ROWS * _dense_bytes(k_in) + 1024 if name in BLOCKS else 0


def float_linear(name: str, level: Level, k_in: int) -> KernelDef:
    """Chunk c: weight rows [chunk_rows * (c % n_tiles), ...) for activation rows [T_BLOCK * (c // n_tiles), ...)."""
    tail = k_in % 16 != 0

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        first = chunk % a.n_tiles * a.chunk_rows
        span = (first, k.minimum(first + a.chunk_rows, a.n))
        matrix = exact_rows(k, level, name, a, a.w, span, k_in, scratch)
        start, x, size = chunk // a.n_tiles * T_BLOCK, a.x, a.k << 2
        rows = Rows(start, k.minimum(start + T_BLOCK, a.live_rows), lambda t: x + t * size, lambda t: t)
        float_rows(k, level, matrix, span, rows, Output.of(a, a.n), tail)

    fields = ("live_rows", "x", "w", "n", "k", "row_bytes", "n_tiles", "chunk_rows", *OUTPUT_FIELDS)
    marks = f"{'/tail' if tail else ''}{f'/{k_in}' if name in BLOCKS else '/short' if k_in < SHORT else ''}"
    return KernelDef(f"float_linear/{name}{marks}", fields, body, exact_scratch(name, k_in))
