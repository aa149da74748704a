"""One activation row against packed weight rows: the decode path, bound by memory.

For weight row n, over superblocks b and groups j:
    y[n] = tree_j( sum_b scale[b, j] * d[b, j] * (codes . q - offset * sum q) ) - tree_j( sum_b minimum[b, j] * d sum q )
The byte products of a group are summed exactly in integers; each lane j is then one chain of fused multiply-adds over b, and
the lanes are added as a fixed tree. `tile` computes the very same chains, so one row gives the same bits in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from quarrel.cpu_backend.abi import Fields, KernelDef
from quarrel.cpu_backend.epilogue import OUTPUT_FIELDS, Output
from quarrel.cpu_backend.features import Level
from quarrel.cpu_backend.formats import BlockFormat
from quarrel.cpu_backend.ir import F32, I8, I32, I64, Kernel, Val, Var, vec
from quarrel.cpu_backend.quantize import QuantRow
from quarrel.cpu_backend.vector import I8x64, I32x16, dot4, fold4, sum_lanes

NEAR, FAR = 1024, 4096
"""How far ahead of the block in use weights are asked into the first and second level cache. Measured on 2 cores with 28 GB/s,
13 MB matrices: none 13, near only 21, far only 23, both 25 GB/s for Q4_K; 28 for Q8_0 and 26 for Q6_K with both."""


def load_codes(k: Kernel, at: Val, halves: tuple[int, int]) -> Val:
    """The activations that belong to one vector of weight codes."""
    first, second = halves
    if second == first + 1:
        return k.load(at, I8x64, 32 * first)
    return k.load(at, vec(I8, 32), 32 * first).concat(k.load(at, vec(I8, 32), 32 * second))


@dataclass(frozen=True)
class Activations:
    """What one superblock of an activation row brings to a format, in its lane order; loaded once for several weight rows."""

    codes: list[Val]
    d: Val
    sums: Val | None
    d_sum: Val | None


def load_activations(k: Kernel, fmt: BlockFormat, x: QuantRow, b: Val) -> Activations:
    """Superblock `b` of the row x."""
    lanes, q = fmt.lane_groups, x.codes + (b << 8)
    d = k.load(x.d + (b << 5), vec(F32, 8)).shuffle([j // (fmt.groups // 8) for j in lanes])
    sums = d_sum = None
    if fmt.groups == 8:
        sums = k.load(x.sum32 + (b << 5), vec(I32, 8)).shuffle(lanes)
        d_sum = k.load(x.d_sum + (b << 5), vec(F32, 8)).shuffle(lanes)
    else:
        sums = k.load(x.sum16 + (b << 6), vec(I32, 16)).shuffle(lanes)
        d_sum = sums.to(F32) * d
    return Activations([load_codes(k, q, h) for h in fmt.halves], d, sums, d_sum)


def superblock_dot(k: Kernel, level: Level, fmt: BlockFormat, at: Val, x: Activations, acc: Var, low: Var | None) -> None:
    """Adds the superblock at `at` of a weight row to the chains `acc` and, of minima, `low`."""
    block = fmt.decode(k, level, at)
    dots = [dot4(k, level, k.zero(I32x16), u, q, fmt.wide) for u, q in zip(block.codes, x.codes)]
    sums = fold4(dots)
    if fmt.groups == 8:
        sums = sums.shuffle([0, 1, 2, 3, 8, 9, 10, 11]) + sums.shuffle([4, 5, 6, 7, 12, 13, 14, 15])
    if fmt.offset:
        sums = sums - x.sums * fmt.offset
    acc.v = k.fma(sums.to(F32), block.scales * x.d, acc.v)
    if block.minima is not None and low is not None:
        low.v = k.fma(block.minima, x.d_sum, low.v)


@dataclass(frozen=True)
class Matrix:
    """Packed weight rows: `n` rows of `row_bytes` at `w`, each of `blocks` whole superblocks and `tail` further blocks."""

    w: Val
    n: Val
    row_bytes: Val
    blocks: Val
    tail: Val
    p: Val
    """Values of a row, padded to whole superblocks."""

    @classmethod
    def of(cls, a: Fields) -> Matrix:
        """From a kernel's fields."""
        return cls(a.w, a.n, a.row_bytes, a.blocks, a.tail, a.p)


MATRIX_FIELDS = ("w", "n", "row_bytes", "blocks", "tail", "p")


def padded_tail(k: Kernel, fmt: BlockFormat, at: Val, blocks: Val) -> Val:
    """A copy of the last, incomplete superblock, zeros for the blocks that the row does not have."""
    buffer = k.stack(fmt.superblock_bytes)
    size = blocks * fmt.nbytes
    with k.range(0, size) as i:
        k.store(k.load(at + i, I8), buffer + i)
    with k.range(size, fmt.superblock_bytes) as i:
        k.store(k.zero(I8), buffer + i)
    return buffer


def _rows(
    k: Kernel, level: Level, fmt: BlockFormat, m: Matrix, x: QuantRow, first: Val, count: int, tail: bool
) -> list[Val]:
    """Results of weight rows first .. first + count - 1, computed side by side."""
    at_rows = [m.w + (first + i) * m.row_bytes for i in range(count)]
    zero = k.zero(vec(F32, fmt.groups))
    acc = [k.var(zero) for _ in at_rows]
    low = [k.var(zero) if fmt.has_minima else None for _ in at_rows]
    with k.range(0, m.blocks) as b:
        # Rows follow one another, so what these rows' steps ask for together is one stream without gaps.
        step = count * fmt.superblock_bytes
        for line in range(0, step, 64):
            k.prefetch(at_rows[0] + b * step, NEAR + line)
            k.prefetch(at_rows[0] + b * step, FAR + line, locality=2)
        activations = load_activations(k, fmt, x, b)
        for i, row in enumerate(at_rows):
            superblock_dot(k, level, fmt, row + b * fmt.superblock_bytes, activations, acc[i], low[i])
    if tail:
        activations = load_activations(k, fmt, x, m.blocks)
        for i, row in enumerate(at_rows):
            rest = padded_tail(k, fmt, row + m.blocks * fmt.superblock_bytes, m.tail)
            superblock_dot(k, level, fmt, rest, activations, acc[i], low[i])
    totals = [sum_lanes(v.v) for v in acc]
    return [y if v is None else y - sum_lanes(v.v) for y, v in zip(totals, low, strict=True)]


def dot_rows(
    k: Kernel,
    level: Level,
    fmt: BlockFormat,
    m: Matrix,
    x: QuantRow,
    span: tuple[Val, Val],
    out: Output,
    row: Val,
    tail: bool,
) -> None:
    """Stores out[row, n] for n in the span of weight rows."""
    n, stop = k.var(span[0]), span[1]
    for count in (2, 1) if level.registers >= 32 else (1,):
        with k.loop_while(lambda: n.v + count <= stop):  # noqa: B023
            for i, y in enumerate(_rows(k, level, fmt, m, x, n.v, count, tail)):
                out.one(k, y, n.v + i, row)
            n.v = n.v + count


def dot_row(fmt: BlockFormat, level: Level, tail: bool) -> KernelDef:
    """Chunk c computes rows bounds[c] .. bounds[c + 1] - 1 of y = W x for the single row x."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        m = Matrix.of(a)
        span = (k.load(a.bounds + (chunk << 3), I64), k.load(a.bounds + (chunk << 3), I64, 8))
        dot_rows(k, level, fmt, m, QuantRow(a.x, m.p), span, Output.of(a, m.n), k.i64(0), tail)

    fields = ("x", "bounds", *MATRIX_FIELDS, *OUTPUT_FIELDS)
    return KernelDef(f"dot_row/{fmt.name}{'/tail' if tail else ''}", fields, body)
