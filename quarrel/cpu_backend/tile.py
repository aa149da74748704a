"""Many activation rows against packed weight rows: the prefill path, bound by arithmetic.

A chunk takes LANES * `vectors` weight rows and up to T_BLOCK activation rows. It first unpacks the weight rows once into scratch
memory, one lane per weight row, four consecutive codes per 32-bit lane:

    codes[p, b, g]   16 rows x 4 bytes     p = chain (a group of the superblock), b = superblock, g = four values
    scales[p, b]     16 x f32              minima likewise

Then every activation row runs down its chains: the byte products of a group sum exactly in integers, one fused multiply-add per
group adds them to the chain, and the chains are added in the tree of `dot_row`. So a row's result has the same bits as there.
"""

from __future__ import annotations

from dataclasses import dataclass

from quarrel.cpu_backend.abi import Fields, KernelDef
from quarrel.cpu_backend.dot_row import padded_tail
from quarrel.cpu_backend.epilogue import EPILOGUE_FIELDS, finish_one, finish_sixteen
from quarrel.cpu_backend.features import Level
from quarrel.cpu_backend.formats import BlockFormat
from quarrel.cpu_backend.ir import F32, I32, I64, Kernel, Val
from quarrel.cpu_backend.quantize import QuantRow
from quarrel.cpu_backend.vector import F32x16, I8x64, I32x16, dot4, transpose16

LANES = 16
T_BLOCK = 512
"""Activation rows of one chunk: their codes stay in the second-level cache while the chunk's weights are in the first."""


@dataclass(frozen=True)
class Shape:
    """Tile of the inner loop: `vectors` vectors of weight rows by `rows` activation rows, all sums in registers."""

    vectors: int
    rows: int


def shapes(level: Level) -> list[Shape]:
    """Wide tile first; the narrow one takes what is left over."""
    if level.registers >= 32:
        return [Shape(2, 6), Shape(2, 2)]
    return [Shape(1, 2)]


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


def unpacked_bytes(fmt: BlockFormat, blocks: int) -> int:
    """Scratch bytes of one vector of weight rows."""
    return blocks * (4096 + 64 * fmt.groups * (2 if fmt.has_minima else 1))


def _unpack_rows(k: Kernel, level: Level, fmt: BlockFormat, addresses: list[Val], to: Unpacked, b: Val) -> None:
    """Unpacks superblock `b` of sixteen rows, each row's bytes at its address."""
    decoded = 4 * 64 + 4 * fmt.groups * (2 if fmt.has_minima else 1)
    buffer = k.stack(decoded * LANES)
    for row, at in enumerate(addresses):
        block = fmt.decode(k, level, at)
        for i, codes in enumerate(block.codes):
            k.store(codes, buffer, row * 256 + 64 * i)
        k.store(block.scales, buffer, LANES * 256 + row * 4 * fmt.groups)
        if block.minima is not None:
            k.store(block.minima, buffer, LANES * (256 + 4 * fmt.groups) + row * 4 * fmt.groups)
    lanes = fmt.lane_groups
    chain_of = {group: chain for chain, group in enumerate(lanes)}
    for i, halves in enumerate(fmt.halves):
        columns = transpose16([k.load(buffer, I32x16, row * 256 + 64 * i) for row in range(LANES)])
        for c, column in enumerate(columns):
            value = 32 * halves[c // 8] + 4 * (c % 8)
            size = 256 // fmt.groups
            k.store(column, to.codes(chain_of[value // size], b), 64 * (value % size // 4))
    for which, place in enumerate((to.scales, to.minima)[: 2 if fmt.has_minima else 1]):
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


def unpack(k: Kernel, level: Level, fmt: BlockFormat, a: Fields, first: Val, to: Unpacked, tail: bool) -> None:
    """Unpacks rows first .. first + 15, the last row standing in for rows past the end."""
    last, row_bytes = a.n - 1, a.row_bytes
    rows = [a.w + k.minimum(first + i, last) * row_bytes for i in range(LANES)]
    whole = a.blocks
    with k.range(0, whole) as b:
        offset = b * fmt.superblock_bytes
        ahead = rows[0] + row_bytes * LANES + offset * LANES
        for line in range(0, fmt.superblock_bytes * LANES, 64):
            k.prefetch(ahead, line, locality=2)
        _unpack_rows(k, level, fmt, [row + offset for row in rows], to, b)
    if tail:
        offset = whole * fmt.superblock_bytes
        _unpack_rows(k, level, fmt, [padded_tail(k, fmt, row + offset, a.tail) for row in rows], to, whole)


def _chain(
    k: Kernel, level: Level, fmt: BlockFormat, weights: list[Unpacked], xs: list[QuantRow], chain: Val, group: Val, out: Val
) -> None:
    """Runs one chain over all superblocks for every (activation row, weight vector); stores sums, then minima, at `out`."""
    size = 256 // fmt.groups
    group_at, group_words = group * size, group << 2
    d_words = (group << 2) if fmt.groups == 8 else (group >> 1 << 2)
    acc = [[k.var(k.zero(F32x16)) for _ in weights] for _ in xs]
    low = [[k.var(k.zero(F32x16)) for _ in weights] for _ in xs] if fmt.has_minima else []
    with k.range(0, weights[0].blocks) as b:
        by32, by16 = (b << 5) + d_words, (b << 6) + group_words
        by_group = (b << 5) + group_words if fmt.groups == 8 else by16
        sums = []
        for x in xs:
            start = k.zero(I32x16)
            if fmt.offset:
                at = (x.sum32 if fmt.groups == 8 else x.sum16) + by_group
                start = k.splat(k.load(at, I32) * -fmt.offset, LANES)
            sums.append([start] * len(weights))
        codes, q_at = [w.codes(chain, b) for w in weights], (b << 8) + group_at
        for g in range(size // 4):
            loaded = [k.load(at, I8x64, 64 * g) for at in codes]
            for t, x in enumerate(xs):
                four = k.splat(k.load(x.codes + q_at, I32, 4 * g), LANES).bitcast(I8x64)
                sums[t] = [dot4(k, level, s, w, four, fmt.wide) for s, w in zip(sums[t], loaded)]
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
    for i, var in enumerate(v for rows in (acc, low) for row in rows for v in row):
        k.store(var.v, out, 64 * i)


def _tree(k: Kernel, at: Val, chains: int, stride: int) -> Val:
    """Adds vectors that lie `stride` bytes apart, in the order of `sum_lanes`."""
    parts = [k.load(at, F32x16, i * stride) for i in range(chains)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:])]
    return parts[0]


def _tile(
    k: Kernel, level: Level, fmt: BlockFormat, a: Fields, shape: Shape, weights: list[Unpacked], first: Val, t: Val
) -> None:
    """Activation rows t .. t + rows - 1, the last row standing in for rows past the end."""
    last = a.live_rows - 1
    rows = [k.minimum(t + i, last) for i in range(shape.rows)]
    xs = [QuantRow(a.x + row * a.x_stride, a.p) for row in rows]
    count = shape.rows * shape.vectors
    stride = 64 * count * (2 if fmt.has_minima else 1)
    buffer = k.stack(stride * fmt.groups)
    groups = k.table(fmt.lane_groups)
    with k.range(0, fmt.groups) as chain:
        _chain(k, level, fmt, weights, xs, chain, k.load(groups + (chain << 3), I64), buffer + chain * stride)
    for i, row in enumerate(rows):
        for v in range(shape.vectors):
            at = 64 * (i * shape.vectors + v)
            y = _tree(k, buffer + at, fmt.groups, stride)
            if fmt.has_minima:
                y = y - _tree(k, buffer + at + 64 * count, fmt.groups, stride)
            _finish(k, a, y, first + LANES * v, row)


def _finish(k: Kernel, a: Fields, y: Val, n: Val, t: Val) -> None:
    with k.either(n + LANES <= a.n) as (whole, part):
        with whole:
            finish_sixteen(k, a, y, n, t)
        with part:
            buffer = k.stack(64)
            k.store(y, buffer)
            with k.range(n, a.n) as i:
                finish_one(k, a, k.load(buffer + (i - n << 2), F32), i, t)


def tile(fmt: BlockFormat, level: Level, tail: bool, k_padded: int) -> KernelDef:
    """Chunk c computes weight rows [32 * (c % n_tiles), ...) for activation rows [T_BLOCK * (c // n_tiles), ...)."""
    wide, *others = shapes(level)

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        blocks = a.p >> 8
        each = unpacked_bytes(fmt, 1)
        weights = [Unpacked(fmt, scratch + blocks * (each * v), blocks) for v in range(wide.vectors)]
        first = chunk % a.n_tiles * (LANES * wide.vectors)
        for v, to in enumerate(weights):
            unpack(k, level, fmt, a, first + LANES * v, to, tail)
        start = chunk // a.n_tiles * T_BLOCK
        t, stop = k.var(start), k.minimum(start + T_BLOCK, a.live_rows)
        for shape in (wide, *others):
            step = shape.rows
            with k.loop_while(lambda: t.v < stop if shape is (others or [wide])[-1] else t.v + step <= stop):  # noqa: B023
                _tile(k, level, fmt, a, shape, weights, first, t.v)
                t.v = t.v + step

    fields = ("live_rows", "x", "x_stride", "w", "n", "p", "blocks", "tail", "row_bytes", "n_tiles", *EPILOGUE_FIELDS)
    scratch = wide.vectors * unpacked_bytes(fmt, k_padded // 256)
    return KernelDef(f"tile/{fmt.name}{'/tail' if tail else ''}", fields, body, scratch)
