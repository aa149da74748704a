"""Many activation rows times packed weight rows: the prefill path, bound by arithmetic.

A chunk takes LANES * `vectors` weight rows and a block of activation rows. It first unpacks the weight rows once into
scratch memory, one lane per weight row, four consecutive codes per 32-bit lane:

    codes[p, b, g]   16 rows x 4 bytes     p = chain (a group of the superblock), b = superblock, g = four values
                     (where they are multiplied as words: signed, two values of every row, then the other two)
    scales[p, b]     16 x f32              minima likewise

Of a format with integer scales, codes are multiplied by their scales, and instead of scales there are

    minima[p, b]     16 rows x 2 words
    factors[b]       16 x f32              d, then -dmin

Then every activation row runs down its chains: the byte products of a group sum exactly in integers, one fused multiply-add
per group adds them to the chain, and the chains are added in the tree of `matvec`. So results have the same bits as there.
"""

from __future__ import annotations

from dataclasses import dataclass

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, tail_superblock
from quarrel.cpu_backend.linear.activations import QuantRow
from quarrel.cpu_backend.linear.epilogue import OUTPUT_FIELDS, Output
from quarrel.cpu_backend.linear.matvec import MATRIX_FIELDS, Matrix, Rows
from quarrel.cpu_backend.linear.sums import by_words, group_sums
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I16, I32, I64, Kernel, Val, Var, vec
from quarrel.cpu_backend.runtime.vector import (
    F32x16,
    I8x64,
    I32x16,
    code_bias,
    dot2,
    group_value,
    transpose16,
)

LANES = 16
MOST, LEAST, EVEN = 512, 96, 12
"""Activation rows of a block, at most and of long rows, and whose multiples are whole tiles."""
BLOCK_VALUES = 5 << 18
"""Values of a block's rows, which stay in the second-level cache while weights change. Zen 4 (1 MB), 504 rows of Q5_K, Q3_K
and IQ4_XS, ns a superblock and row: of 5632 values 1.9, 2.0 and 1.8 with 192 rows, 2.3, 2.2 and 1.9 with 504; of 14336 2.0,
2.2 and 1.8 with 96, 2.8, 3.0 and 2.9 with 504. Weights are unpacked for every block, so those of short rows are longer."""


@dataclass(frozen=True)
class Shape:
    """Tile of the inner loop: `vectors` vectors of weight rows by `rows` activation rows, all sums in registers."""

    vectors: int
    rows: int


def vectors(level: Level) -> int:
    """Vectors of weight rows of a tile."""
    return 2 if level.registers >= 32 else 1


def shapes(level: Level, fmt: BlockFormat) -> list[Shape]:
    """Wide tile first; the narrow one takes what is left over."""
    if level.registers >= 32:
        return [Shape(2, 6), Shape(2, 2)]
    return [Shape(1, 4 if by_words(level, fmt) else 2)]


def block_rows(p: int) -> int:
    """Activation rows of `p` padded values that a block has at most."""
    return max(LEAST, min(MOST, BLOCK_VALUES // p // EVEN * EVEN))


def _block(k: Kernel, i: Val, rows: Val, p: Val) -> tuple[Val, Val]:
    """Where block i of the rows begins and ends: as few blocks as `block_rows` allows, of about the same length."""
    most = k.maximum(k.minimum(k.i64(BLOCK_VALUES).udiv(p * EVEN) * EVEN, MOST), LEAST)
    blocks = (rows + most - 1).udiv(most)
    each = k.minimum((rows + blocks * EVEN - 1).udiv(blocks * EVEN) * EVEN, most)
    return i * each, k.minimum((i + 1) * each, rows)


def tile_count(level: Level, rows: int) -> int:
    """Tiles that cover so many weight rows."""
    return -(-rows // (LANES * vectors(level)))


@dataclass(frozen=True)
class Unpacked:
    """Where one vector of unpacked weight rows lies: `blocks` superblocks, at `base`."""

    fmt: BlockFormat
    base: Val
    blocks: Val

    @property
    def group_bytes(self) -> int:
        return LANES * 256 // self.fmt.groups

    def codes(self, chain: int, b: Val) -> Val:
        return self.base + (self.blocks * chain + b) * self.group_bytes

    def scales(self, chain: int, b: Val) -> Val:
        return self.base + (self.blocks << 12) + ((self.blocks * chain + b) << 6)

    def minima(self, chain: int, b: Val) -> Val:
        return self.scales(chain, b) + self.blocks * (64 * self.fmt.groups)

    def factors(self, i: int, b: Val) -> Val:
        return self.base + self.blocks * (4096 + 64 * (self.fmt.groups + i)) + (b << 6)


def unpacked_bytes(fmt: BlockFormat, blocks: int) -> int:
    """Scratch bytes of one vector of weight rows."""
    return blocks * (4096 + 64 * (fmt.groups + 2 if fmt.product else fmt.groups * (2 if fmt.has_minima else 1)))


def _products(k: Kernel, fmt: BlockFormat, block: Superblock) -> list[Val]:
    """Codes multiplied by integer scales: as words, whose two bytes do not meet."""
    out = []
    for codes, runs in zip(block.codes, fmt.runs, strict=True):
        scales = block.integers[0].shuffle([run for run in runs for _ in range(8)])
        out.append((codes.bitcast(scales.type) * scales >> 2 & 0x3F3F).bitcast(I8x64))
    return out


def _transpose_superblock(k: Kernel, level: Level, fmt: BlockFormat, buffer: Val, to: Unpacked, b: Val) -> None:
    """Sixteen decoded rows (codes, then scales, then minima) to one lane per row."""
    chain_of = {group: chain for chain, group in enumerate(fmt.lane_groups)}
    size = 256 // fmt.groups
    for i, runs in enumerate(fmt.runs):
        columns = transpose16([k.load(buffer, I32x16, row * 256 + 64 * i) for row in range(LANES)])
        for c, column in enumerate(columns):
            value = 16 * runs[c // 4] + 4 * (c % 4)
            if by_words(level, fmt):
                twos = (column.bitcast(I8x64) ^ 0x80).bitcast(vec(I16, 32))
                column = twos.shuffle([*range(0, 32, 2), *range(1, 32, 2)])
            k.store(column, to.codes(chain_of[value // size], b), 64 * (value % size // 4))
    for which, place in enumerate((to.scales, to.minima)[: 2 if fmt.minimum_chains else 1]):
        start = LANES * 256 + which * LANES * 4 * fmt.groups
        if fmt.groups == 16:
            columns = transpose16([k.load(buffer, F32x16, start + row * 64) for row in range(LANES)])
        else:
            # Rows of eight: two rows fill a vector, so the transpose leaves even rows and odd rows apart.
            paired = [k.load(buffer, F32x16, start + row * 64) for row in range(8)]
            both = transpose16(paired + paired)
            order = [r // 2 + r % 2 * LANES for r in range(LANES)]
            columns = [both[c].shuffle(order, both[c + 8]) for c in range(8)]
        for chain, column in enumerate(columns):
            k.store(column, place(chain, b))


def _unpack_superblock(
    k: Kernel, level: Level, fmt: BlockFormat, m: Matrix, first: Val, to: Unpacked, b: Val, tail: bool
) -> None:
    """Superblock `b` of rows first .. first + 15, rows past the end repeat the last row."""
    each = 4 * fmt.groups
    buffer = k.stack((256 + each * (2 if fmt.has_minima else 1)) * LANES)
    end = m.w + m.n * m.row_bytes
    with k.range(0, LANES) as row:
        at = m.w + k.minimum(first + row, m.n - 1) * m.row_bytes + b * fmt.superblock_bytes
        block = tail_superblock(k, level, fmt, at, m.tail, end) if tail else fmt.decode(k, level, at)
        for i, codes in enumerate(_products(k, fmt, block) if fmt.product else block.codes):
            k.store(codes, buffer + (row << 8), 64 * i)
        if fmt.product:
            k.store(block.integers[1], buffer + row * each, LANES * 256)
            for i, factor in enumerate((4.0, 1.0)):
                k.store(block.factors[i] * factor, to.factors(i, b) + (row << 2))
        else:
            k.store(block.scales, buffer + row * each, LANES * 256)
        if block.minima is not None:
            k.store(block.minima, buffer + row * each, LANES * (256 + each))
    _transpose_superblock(k, level, fmt, buffer, to, b)


def unpack(k: Kernel, level: Level, fmt: BlockFormat, m: Matrix, first: Val, to: Unpacked, tail: bool) -> None:
    """Unpacks rows first .. first + 15, prefetching the next sixteen."""
    with k.range(0, m.blocks) as b:
        ahead = m.w + (first + LANES) * m.row_bytes + b * (fmt.superblock_bytes * LANES)
        for line in range(0, fmt.superblock_bytes * LANES, 64):
            k.prefetch(ahead, line, locality=2)
        _unpack_superblock(k, level, fmt, m, first, to, b, False)
    if tail:
        _unpack_superblock(k, level, fmt, m, first, to, m.blocks, True)


def _chain(
    k: Kernel,
    level: Level,
    fmt: BlockFormat,
    weights: list[Unpacked],
    xs: list[QuantRow],
    chain: Val,
    group: Val,
    last: Val,
    out: Val,
) -> None:
    """Runs one chain over all superblocks for every (activation row, weight vector); stores sums, then minima, at `out`.

    last: groups of the last superblock that hold anything. The others would add zeros, and are left out: of rows of 384,
    a quarter of the work.
    """
    acc = [[k.var(k.zero(F32x16)) for _ in weights] for _ in xs]
    low = [[k.var(k.zero(F32x16)) for _ in weights] for _ in xs] if fmt.minimum_chains else []
    with k.range(0, weights[0].blocks - k.select(group < last, k.i64(0), 1)) as b:
        if fmt.product:
            _add_integers(k, level, fmt, weights, xs, chain, b, acc)
        else:
            _add_group(k, level, fmt, weights, xs, chain, group, b, acc, low)
    for i, var in enumerate(v for rows in (acc, low) for row in rows for v in row):
        k.store(var.v, out, 64 * i)


def _add_group(
    k: Kernel,
    level: Level,
    fmt: BlockFormat,
    weights: list[Unpacked],
    xs: list[QuantRow],
    chain: Val,
    group: Val,
    b: Val,
    acc: list[list[Var]],
    low: list[list[Var]],
) -> None:
    """A group of superblock `b` to its chain, and its minimum to another."""
    size = 256 // fmt.groups
    group_at, group_words = group * size, chain << 2
    d_words = (group << 2) if fmt.groups == 8 else (group >> 1 << 2)
    by32, by16 = (b << 5) + d_words, (b << 6) + group_words
    by_group = (b << 5) + group_words if fmt.groups == 8 else by16
    starts = [k.zero(I32x16) for _ in xs]
    if offset := fmt.offset - code_bias(level, fmt.wide):
        sums_at = [(x.sum32 if fmt.groups == 8 else x.sum16) + by_group for x in xs]
        starts = [k.splat(k.load(at, I32) * -offset, LANES) for at in sums_at]
    q_at = (b << 8) + group_at
    sums = group_sums(k, level, fmt, [w.codes(chain, b) for w in weights], [x.codes + q_at for x in xs], starts)
    scales = [k.load(w.scales(chain, b), F32x16) for w in weights]
    minima = [k.load(w.minima(chain, b), F32x16) for w in weights] if fmt.has_minima else []
    for t, x in enumerate(xs):
        d = k.load(x.d + by32, F32)
        for v, scale in enumerate(scales):
            acc[t][v].v = k.fma(sums[t][v].to(F32), scale * k.splat(d, LANES), acc[t][v].v)
        if fmt.has_minima:
            d_sum = k.load(x.d_sum + by32, F32) if fmt.groups == 8 else k.load(x.sum16 + by16, I32).to(F32) * d
            for v, minimum in enumerate(minima):
                low[t][v].v = k.fma(minimum, k.splat(d_sum, LANES), low[t][v].v)


def _add_integers(
    k: Kernel,
    level: Level,
    fmt: BlockFormat,
    weights: list[Unpacked],
    xs: list[QuantRow],
    chain: Val,
    b: Val,
    acc: list[list[Var]],
) -> None:
    """32 values of superblock `b` to their chain, for a format with integer scales; groups lie in the order of values."""
    group_at, words_at = chain << 5, (b << 5) + (chain << 2)
    codes = [w.codes(chain, b) for w in weights]
    sums = group_sums(k, level, fmt, codes, [x.codes + (b << 8) + group_at for x in xs], [k.zero(I32x16) for _ in xs])
    for v, w in enumerate(weights):
        minima = k.load(w.scales(chain, b), vec(I16, 2 * LANES))
        d, minus = (k.load(w.factors(i, b), F32x16) for i in range(2))
        for t, x in enumerate(xs):
            words = k.splat(k.load(x.words16 + words_at, I32), LANES).bitcast(vec(I16, 2 * LANES))
            value = group_value(k, sums[t][v], d, dot2(k, level, words, minima), minus)
            acc[t][v].v = k.fma(value, k.splat(k.load(x.d + words_at, F32), LANES), acc[t][v].v)


def _tree(k: Kernel, at: Val, chains: int, stride: int) -> Val:
    """Adds vectors that lie `stride` bytes apart, in the order of `sum_lanes`."""
    parts = [k.load(at, F32x16, i * stride) for i in range(chains)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:])]
    return parts[0]


def _tile(
    k: Kernel,
    level: Level,
    fmt: BlockFormat,
    m: Matrix,
    shape: Shape,
    weights: list[Unpacked],
    first: Val,
    rows: Rows,
    t: Val,
    out: Output,
    tail: bool,
) -> None:
    """Activation rows t .. t + shape.rows - 1, rows past the end repeat the last row."""
    ts = [k.minimum(t + i, rows.stop - 1) for i in range(shape.rows)]
    xs = [QuantRow(rows.source(row), m.p) for row in ts]
    count = shape.rows * shape.vectors
    stride = 64 * count * (2 if fmt.minimum_chains else 1)
    buffer = k.stack(stride * fmt.groups)
    groups = k.table(fmt.lane_groups)
    last = m.tail * (fmt.elements * fmt.groups // 256) if tail else k.i64(fmt.groups)
    with k.range(0, fmt.groups) as chain:
        group = k.load(groups + (chain << 3), I64)
        _chain(k, level, fmt, weights, xs, chain, group, last, buffer + chain * stride)
    for i, row in enumerate(ts):
        for v in range(shape.vectors):
            at = 64 * (i * shape.vectors + v)
            y = _tree(k, buffer + at, fmt.groups, stride)
            if fmt.minimum_chains:
                y = y - _tree(k, buffer + at + 64 * count, fmt.groups, stride)
            with k.when(first + LANES * v < m.n):
                out.sixteen(k, y, first + LANES * v, rows.target(row))


def tile_rows(
    k: Kernel, level: Level, fmt: BlockFormat, m: Matrix, first: Val, rows: Rows, out: Output, scratch: Val, tail: bool
) -> None:
    """Stores the results of one tile of weight rows, starting at `first`, for the given activation rows."""
    wide, *others = shapes(level, fmt)
    blocks = m.p >> 8
    each = unpacked_bytes(fmt, 1)
    with k.range(0, wide.vectors) as v:
        unpack(k, level, fmt, m, first + v * LANES, Unpacked(fmt, scratch + blocks * v * each, blocks), tail)
    weights = [Unpacked(fmt, scratch + blocks * (each * v), blocks) for v in range(wide.vectors)]
    t = k.var(rows.start)
    for shape in (wide, *others):
        last = shape is (others or [wide])[-1]
        with k.loop_while(lambda: t.v < rows.stop if last else t.v + shape.rows <= rows.stop):  # noqa: B023
            _tile(k, level, fmt, m, shape, weights, first, rows, t.v, out, tail)
            t.v = t.v + shape.rows


def tile_scratch(fmt: BlockFormat, level: Level, k_padded: int) -> int:
    """Scratch bytes that `tile_rows` needs."""
    return vectors(level) * unpacked_bytes(fmt, k_padded // 256)


def tile(fmt: BlockFormat, level: Level, tail: bool, k_padded: int) -> KernelDef:
    """Chunk c computes weight rows [32 * (c % n_tiles), ...) for the block c // n_tiles of activation rows."""
    step = LANES * vectors(level)

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        m, x, stride = Matrix.of(a), a.x, a.x_stride
        start, stop = _block(k, chunk.udiv(a.n_tiles), a.live_rows, m.p)
        rows = Rows(start, stop, lambda t: x + t * stride, lambda t: t)
        tile_rows(k, level, fmt, m, chunk % a.n_tiles * step, rows, Output.of(a, m.n), scratch, tail)

    fields = ("live_rows", "x", "x_stride", "n_tiles", *MATRIX_FIELDS, *OUTPUT_FIELDS)
    return KernelDef(f"tile/{fmt.name}{'/tail' if tail else ''}", fields, body, tile_scratch(fmt, level, k_padded))
