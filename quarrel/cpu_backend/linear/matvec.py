"""A few activation rows times packed weight rows: the decode path, bound by memory.

For weight row n, over superblocks b and groups j:
    y[n] = tree_j( sum_b scale[b, j] * d[b, j] * (codes . q - offset * sum q) ) - tree_j( sum_b minimum[b, j] * d sum q )
(of a format with integer scales, d * x.d times what the integers of 32 values give together; see `formats/block.py`).
The byte products of a group are summed exactly in integers; each lane j is then one chain of fused multiply-adds over b,
and the lanes are added as a fixed tree. `tile` computes the very same chains, so one row gives the same bits in any batch.

A superblock of weights is decoded once for two activation rows; with more than MATVEC_ROWS of them `tile`, which unpacks
sixteen weight rows at once, is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, tail_superblock
from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.linear.activations import QuantRow, padded
from quarrel.cpu_backend.linear.epilogue import OUTPUT_FIELDS, Output
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I16, I32, I64, Kernel, Val, Var, vec
from quarrel.cpu_backend.runtime.vector import (
    F32x16,
    I8x64,
    I32x16,
    code_bias,
    dot2,
    dot4,
    dot8,
    fold4,
    group_value,
    sum_lanes,
)
from quarrel.cpu_backend.weights import Packed

NEAR, FAR, PAGE = 1536, 8192, 16384
"""How far ahead of the block in use weights are prefetched: into the first level cache, into the second, and one line so
that the page's address is translated in time. Measured on 2 cores, 13 MB matrices in a file's mapping, where a plain read
makes 25.9 GB/s: without any 13 GB/s of Q4_K, near and far (1024, 4096) 22.8, all three 25.4; Q6_K 25.0, Q8_0 27.0."""

MATVEC_ROWS = 8
"""Activation rows, at most, that are computed here. On AVX2 (Zen 3) a superblock of Q4_K takes 31, 46 and 92 cycles for 1,
2 and 4 rows, in tiles 163, 164 and 188; Q8_0 40, 62 and 124 for 173, 173 and 205; MXFP4 44, 62, 124 for 172, 172, 220."""


def shapes(level: Level) -> dict[int, tuple[int, ...]]:
    """How many weight rows are computed at once, and by how many activation rows, which share the decoded superblocks.

    Four instead of two save a tenth more and take twice as long to compile.
    """
    if level.registers >= 32:
        return {2: (2, 1), 1: (1,)}
    return {1: (1,) if level.dot == "plain" else (2, 1)}


@dataclass(frozen=True)
class Activations:
    """What one superblock of an activation row brings to a format, in its lane order; loaded once for two weight rows."""

    codes: list[Val]
    d: Val
    sums: Val | None
    d_sum: Val | None
    words: Val | None = None
    """Sums of 16 values."""


def load_activations(k: Kernel, fmt: BlockFormat, x: QuantRow, b: Val) -> Activations:
    """Superblock `b` of the row x."""
    lanes, codes = fmt.lane_groups, (x.split if fmt.groups == 8 else x.codes) + (b << 8)
    d = k.load(x.d + (b << 5), vec(F32, 8)).shuffle([j // (fmt.groups // 8) for j in lanes])
    sums = d_sum = words = None
    if fmt.product:
        words = k.load(x.words16 + (b << 5), vec(I16, 16))
    elif fmt.groups == 8:
        sums = k.load(x.sum32 + (b << 5), vec(I32, 8))
        d_sum = k.load(x.d_sum + (b << 5), vec(F32, 8))
    else:
        sums = k.load(x.sum16 + (b << 6), I32x16)
        d_sum = sums.to(F32) * d
    return Activations([k.load(codes, I8x64, 64 * i) for i in range(4)], d, sums, d_sum, words)


def _sixteen_sums(
    k: Kernel, level: Level, fmt: BlockFormat, codes: list[Val], x: Activations, factors: Val | None = None
) -> Val:
    """Sums of code * activation per group of 16, perhaps multiplied by words (see `fold4`)."""
    dots = [dot4(k, level, k.zero(I32x16), u, q, fmt.wide) for u, q in zip(codes, x.codes, strict=True)]
    return fold4(k, level, dots, fmt.largest * 4 * 127, factors)


def _eight_sums(k: Kernel, level: Level, fmt: BlockFormat, blocks: list[Superblock], x: Activations) -> Val:
    """Sums of code * activation per group of 32, those of one row after the other."""
    if len(blocks) == 1 and level.dot != "plain":
        pairs = zip(blocks[0].codes, x.codes, strict=True)
        return fold4(k, level, [dot8(k, level, u, q, fmt.largest) for u, q in pairs], fmt.largest * 8 * 127)
    sums = [_sixteen_sums(k, level, fmt, block.codes, x) for block in blocks]
    first, second = ([*range(h, h + 8), *range(16 + h, 24 + h)][: 8 * len(blocks)] for h in (0, 8))
    return sums[0].shuffle(first, sums[-1]) + sums[0].shuffle(second, sums[-1])


def superblock_dot(
    k: Kernel, level: Level, fmt: BlockFormat, blocks: list[Superblock], x: Activations, chains: list[Var]
) -> None:
    """Adds superblocks of one or two weight rows to the chains of those rows (see `new_chains`)."""
    rows = len(blocks)
    if fmt.groups == 16:
        _add_sixteen(k, fmt, blocks, [_sixteen_sums(k, level, fmt, block.codes, x) for block in blocks], x, chains)
        return
    if fmt.product:
        _add_integers(k, level, fmt, blocks, x, chains)
        return
    both = _eight_sums(k, level, fmt, blocks, x)
    offset = fmt.offset - code_bias(level, fmt.wide)
    if offset:
        both = both - _twice(x.sums * offset, rows)
    f = both.to(F32)
    if not fmt.has_minima:
        factors = blocks[0].factors if rows == 1 else blocks[0].factors.concat(blocks[1].factors)
        chains[0].v = k.fma(f, factors * _twice(x.d, rows), chains[0].v)
        return
    # A row's minima are chains beside its scales: one multiply-add serves both.
    d = x.d.concat(k.f32(1.0, 8))
    for row, (block, chain) in enumerate(zip(blocks, chains, strict=True)):
        values = f.shuffle([*range(8 * row, 8 * row + 8), *range(8 * rows, 8 * rows + 8)], _twice(x.d_sum, rows))
        chain.v = k.fma(values, block.factors * d, chain.v)


def _twice(v: Val, rows: int) -> Val:
    """For each of one or two rows."""
    return v if rows == 1 else v.concat(v)


def _add_sixteen(
    k: Kernel, fmt: BlockFormat, blocks: list[Superblock], sums: list[Val], x: Activations, chains: list[Var]
) -> None:
    """`superblock_dot` for groups of 16: one vector of chains per row, another for minima."""
    for row, (block, total) in enumerate(zip(blocks, sums, strict=True)):
        if fmt.offset:
            total = total - x.sums * fmt.offset
        chain = chains[row]
        chain.v = k.fma(total.to(F32), block.scales * x.d, chain.v)
        if block.minima is not None:
            low = chains[len(blocks) + row]
            low.v = k.fma(block.minima, x.d_sum, low.v)


def _add_integers(
    k: Kernel, level: Level, fmt: BlockFormat, blocks: list[Superblock], x: Activations, chains: list[Var]
) -> None:
    """`superblock_dot` for formats with integer scales: one chain for 32 values, minima included."""
    rows, words = len(blocks), x.words
    assert words is not None
    values = []
    for block in blocks:
        scales, minima = block.integers
        twice = scales.shuffle([i + part for part in (0, 1) for i in range(0, 16, 2) for _ in range(2)])
        sums = _sixteen_sums(k, level, fmt, block.codes, x, twice)
        total = sums.shuffle(range(8)) + sums.shuffle(range(8, 16))
        d, minus = (k.splat(block.factors[i], 8) for i in range(2))
        values.append(group_value(k, total, d, dot2(k, level, words, minima), minus))
    both = values[0] if rows == 1 else values[0].concat(values[1])
    chains[0].v = k.fma(both, _twice(x.d, rows), chains[0].v)


def new_chains(k: Kernel, fmt: BlockFormat, rows: int) -> list[Var]:
    """Zeroed chains for one or two rows: 8 groups: all rows in one vector, or a vector per row with its minima in the
    upper half; 16 groups: a vector per row, then one per row for minima."""
    if fmt.groups == 8 and not fmt.minimum_chains:
        return [k.var(k.zero(vec(F32, 8 * rows)))]
    return [k.var(k.zero(F32x16)) for _ in range(rows * (2 if fmt.groups == 16 and fmt.minimum_chains else 1))]


def chain_totals(fmt: BlockFormat, chains: list[Var], rows: int) -> list[Val]:
    """The rows' results."""
    if fmt.groups == 16:
        totals = [sum_lanes(v.v) for v in chains]
        return [y - low for y, low in zip(totals[:rows], totals[rows:])] if fmt.minimum_chains else totals
    lower, upper = range(8), range(8, 16)
    if not fmt.minimum_chains:
        return [sum_lanes(chains[0].v.shuffle(part)) for part in (lower, upper)[:rows]]
    return [sum_lanes(v.v.shuffle(lower)) - sum_lanes(v.v.shuffle(upper)) for v in chains]


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


def matrix_fields(w: Packed, n: int) -> dict[str, int]:
    """The fields that `Matrix.of` reads, of a matrix of `n` rows (one expert's, where `w` stacks them)."""
    tail = w.k % 256 // BLOCKS[w.type].elements
    return dict(zip(MATRIX_FIELDS, (w.address, n, w.row_bytes, w.k // 256, tail, padded(w.k)), strict=True))


@dataclass(frozen=True)
class Rows:
    """Activation rows [start, stop): where row t lies, and which row of the output it makes."""

    start: Val
    stop: Val
    source: Callable[[Val], Val]
    target: Callable[[Val], Val]


def _rows(
    k: Kernel, level: Level, fmt: BlockFormat, m: Matrix, xs: list[QuantRow], first: Val, count: int, tail: bool
) -> list[list[Val]]:
    """For every row of xs, the results of weight rows first .. first + count - 1: all computed side by side."""
    at_rows = [m.w + (first + i) * m.row_bytes for i in range(count)]
    chains = [new_chains(k, fmt, count) for _ in xs]

    def add(blocks: list[Superblock], b: Val) -> None:
        for x, of_row in zip(xs, chains, strict=True):
            superblock_dot(k, level, fmt, blocks, load_activations(k, fmt, x, b), of_row)

    with k.range(0, m.blocks) as b:
        # Rows follow one another, so what these rows prefetch together is one run of memory without gaps.
        step = count * fmt.superblock_bytes
        for line in range(0, step, 64):
            k.prefetch(at_rows[0] + b * step, NEAR + line)
            k.prefetch(at_rows[0] + b * step, FAR + line, locality=2)
        k.prefetch(at_rows[0] + b * step, PAGE, locality=2)
        add([fmt.decode(k, level, row + b * fmt.superblock_bytes) for row in at_rows], b)
    if tail:
        at, end = m.blocks * fmt.superblock_bytes, m.w + m.n * m.row_bytes
        add([tail_superblock(k, level, fmt, row + at, m.tail, end) for row in at_rows], m.blocks)
    return [chain_totals(fmt, of_row, count) for of_row in chains]


def matvec_rows(
    k: Kernel,
    level: Level,
    fmt: BlockFormat,
    m: Matrix,
    rows: Rows,
    span: tuple[Val, Val],
    out: Output,
    tail: bool,
    alone: bool = False,
) -> None:
    """Stores the results of the weight rows in the span, each of which meets every activation row while it is in the cache.

    alone: there is only one activation row.
    """
    n, stop = k.var(span[0]), span[1]
    for count, widths in shapes(level).items():
        with k.loop_while(lambda: n.v + count <= stop):  # noqa: B023
            t = k.var(rows.start)
            for width in (1,) if alone else widths:
                with k.loop_while(lambda: t.v + width <= rows.stop):  # noqa: B023
                    ts = [t.v + i for i in range(width)]
                    xs = [QuantRow(rows.source(row), m.p) for row in ts]
                    for row, results in zip(ts, _rows(k, level, fmt, m, xs, n.v, count, tail), strict=True):
                        for i, y in enumerate(results):
                            out.store(k, y, n.v + i, rows.target(row))
                    t.v = t.v + width
            n.v = n.v + count


def matvec(fmt: BlockFormat, level: Level, tail: bool) -> KernelDef:
    """Chunk c computes rows bounds[c] .. bounds[c + 1] - 1 of y = W x for a few rows x."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        m, x, stride = Matrix.of(a), a.x, a.x_stride
        span = (k.load(a.bounds + (chunk << 3), I64), k.load(a.bounds + (chunk << 3), I64, 8))
        rows = Rows(k.i64(0), a.live_rows, lambda t: x + t * stride, lambda t: t)
        matvec_rows(k, level, fmt, m, rows, span, Output.of(a, m.n), tail)

    fields = ("live_rows", "x", "x_stride", "bounds", *MATRIX_FIELDS, *OUTPUT_FIELDS)
    return KernelDef(f"matvec/{fmt.name}{'/tail' if tail else ''}", fields, body)
