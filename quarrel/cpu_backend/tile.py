"""Many activation rows against packed weight rows: the prefill path, bound by arithmetic.

A chunk takes one tile of weight rows (`vectors` vectors, one lane per row) and a run of activation tiles (`slots` rows
each, packed by `pack`). It unpacks the weight rows once into scratch memory, so that the inner loop walks two streams:

    weights     [chain p][superblock b]: per vector, codes of four consecutive values per lane; scales; minima
    activations [group j][superblock b]: codes of four consecutive values per slot; d; d * sum; sum; sums of 16

Every (weight row, activation row) runs down its chains: the byte products of a group sum exactly in integers, one fused
multiply-add per group adds them to the chain, and the chains are added in the tree of `dot_row`: the same bits as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quarrel.cpu_backend.abi import Fields, KernelDef
from quarrel.cpu_backend.dot_row import MATRIX_FIELDS, Matrix, dot_rows, padded_tail
from quarrel.cpu_backend.epilogue import OUTPUT_FIELDS, Output
from quarrel.cpu_backend.features import Level
from quarrel.cpu_backend.formats import BlockFormat
from quarrel.cpu_backend.ir import F32, I32, I64, Kernel, Val, Var
from quarrel.cpu_backend.pack import Packed, tile_slots
from quarrel.cpu_backend.quantize import QuantRow
from quarrel.cpu_backend.vector import F32x16, I8x64, I32x16, dot4, transpose16

LANES = 16
TILES_PER_CHUNK = 86
"""Activation tiles of one chunk: 512 rows, whose codes stay in the second-level cache."""


def vectors(level: Level) -> int:
    """Vectors of weight rows in a tile: their sums and those of the chains fill the registers."""
    return 2 if level.registers >= 32 else 1


def tile_rows(level: Level) -> int:
    """Weight rows of a tile."""
    return LANES * vectors(level)


@dataclass(frozen=True)
class Unpacked:
    """A tile of weight rows in scratch memory, `blocks` superblocks long."""

    level: Level
    fmt: BlockFormat
    base: Val
    blocks: Val

    @property
    def vectors(self) -> int:
        return vectors(self.level)

    @property
    def quads(self) -> int:
        """Vectors of codes in a group, four values each."""
        return 64 // self.fmt.groups

    @property
    def unit(self) -> int:
        """Bytes of one group of one superblock."""
        return self.vectors * 64 * (self.quads + 1 + self.fmt.has_minima)

    def at(self, chain: Val | int, b: Val) -> Val:
        return self.base + (self.blocks * chain + b) * self.unit

    def codes(self, v: int, g: int) -> int:
        return 64 * (g * self.vectors + v)

    def scales(self, v: int) -> int:
        return 64 * (self.quads * self.vectors + v)

    def minima(self, v: int) -> int:
        return 64 * ((self.quads + 1) * self.vectors + v)


def tile_scratch(fmt: BlockFormat, level: Level, k_padded: int) -> int:
    """Scratch bytes of an unpacked tile and of the sums."""
    units = vectors(level) * 64 * (64 // fmt.groups + 1 + fmt.has_minima)
    return k_padded // 256 * fmt.groups * units + _sums_bytes(fmt, level)


def _transpose_superblock(k: Kernel, fmt: BlockFormat, buffer: Val, to: Unpacked, b: Val, skip: Val) -> None:
    """Sixteen decoded rows (codes, then scales, then minima) to one lane per row, for the vector `skip` bytes further."""
    chain_of = {group: chain for chain, group in enumerate(fmt.lane_groups)}
    size = 256 // fmt.groups
    for i, halves in enumerate(fmt.halves):
        columns = transpose16([k.load(buffer, I32x16, row * 256 + 64 * i) for row in range(LANES)])
        for c, column in enumerate(columns):
            value = 32 * halves[c // 8] + 4 * (c % 8)
            k.store(column, to.at(chain_of[value // size], b) + skip, to.codes(0, value % size // 4))
    for which in range(2 if fmt.has_minima else 1):
        start = LANES * 256 + which * LANES * 4 * fmt.groups
        if fmt.groups == 16:
            columns = transpose16([k.load(buffer, F32x16, start + row * 64) for row in range(LANES)])
        else:
            # Rows of eight: two rows fill a vector, so the transpose leaves even rows and odd rows apart.
            paired = [k.load(buffer, F32x16, start + row * 64) for row in range(8)]
            both = transpose16(paired + paired)
            order = [r // 2 + r % 2 * LANES for r in range(LANES)]
            columns = [both[c].shuffle(order, both[c + 8]) for c in range(8)]
        offset = to.minima(0) if which else to.scales(0)
        for chain, column in enumerate(columns):
            k.store(column, to.at(chain, b) + skip, offset)


def _unpack_superblock(
    k: Kernel, level: Level, fmt: BlockFormat, m: Matrix, first: Val, to: Unpacked, b: Val, v: Val, tail: bool
) -> None:
    """Superblock `b` of vector v's rows, first .. first + 15, the last row standing in for rows past the end."""
    each = 4 * fmt.groups
    buffer = k.stack((256 + each * (2 if fmt.has_minima else 1)) * LANES)
    with k.range(0, LANES) as row:
        at = m.w + k.minimum(first + row, m.n - 1) * m.row_bytes + b * fmt.superblock_bytes
        block = fmt.decode(k, level, padded_tail(k, fmt, at, m.tail) if tail else at)
        for i, codes in enumerate(block.codes):
            k.store(codes, buffer + (row << 8), 64 * i)
        k.store(block.scales, buffer + row * each, LANES * 256)
        if block.minima is not None:
            k.store(block.minima, buffer + row * each, LANES * (256 + each))
    _transpose_superblock(k, fmt, buffer, to, b, v << 6)


def unpack(k: Kernel, level: Level, fmt: BlockFormat, m: Matrix, first: Val, to: Unpacked, tail: bool) -> None:
    """Unpacks the tile that starts at row `first`, asking for the rows behind it as it goes."""
    with k.range(0, to.vectors) as v:
        row = first + v * LANES
        with k.range(0, m.blocks) as b:
            ahead = m.w + (row + LANES) * m.row_bytes + b * (fmt.superblock_bytes * LANES)
            for line in range(0, fmt.superblock_bytes * LANES, 64):
                k.prefetch(ahead, line, locality=2)
            _unpack_superblock(k, level, fmt, m, row, to, b, v, False)
        if tail:
            _unpack_superblock(k, level, fmt, m, row, to, m.blocks, v, True)


def _chain(k: Kernel, w: Unpacked, x: Packed, slots: int, chain: Val, group: Val, out: Val) -> None:
    """Runs one chain over all superblocks for `slots` activation rows and every vector; stores the sums at `out`."""
    fmt = w.fmt
    acc = [[k.var(k.zero(F32x16)) for _ in range(w.vectors)] for _ in range(slots)]
    # A group of 16 is one half of a packed group of 32.
    per32 = fmt.groups // 8
    half = group & (per32 - 1)
    first = x.at(group.udiv(per32), k.i64(0))
    codes_skip, sums_skip = half * x.codes(4, 0), half * x.sum16(1, 0) - half * x.sum16(0, 0)
    with k.range(0, w.blocks) as b:
        xs, ws = first + b * x.unit, w.at(chain, b)
        sums = []
        for t in range(slots):
            start = k.zero(I32x16)
            if fmt.offset:
                at = xs if per32 == 1 else xs + sums_skip
                total = k.load(at, I32, x.sum32(t) if per32 == 1 else x.sum16(0, t))
                start = k.splat(total * -fmt.offset, LANES)
            sums.append([start] * w.vectors)
        codes = xs if per32 == 1 else xs + codes_skip
        for g in range(w.quads):
            loaded = [k.load(ws, I8x64, w.codes(v, g)) for v in range(w.vectors)]
            for t in range(slots):
                four = k.splat(k.load(codes, I32, x.codes(g, t)), LANES).bitcast(I8x64)
                sums[t] = [dot4(k, w.level, s, row, four, fmt.wide) for s, row in zip(sums[t], loaded)]
        scales = [k.load(ws, F32x16, w.scales(v)) for v in range(w.vectors)]
        for t in range(slots):
            d = k.splat(k.load(xs, F32, x.d(t)), LANES)
            for v, scale in enumerate(scales):
                acc[t][v].v = k.fma(sums[t][v].to(F32), scale * d, acc[t][v].v)
    _store_all(k, acc, out)


def _minima_chain(k: Kernel, w: Unpacked, x: Packed, slots: int, chain: Val, group: Val, out: Val) -> None:
    """The same for the minima, in a loop of its own: together the sums would not fit the registers."""
    acc = [[k.var(k.zero(F32x16)) for _ in range(w.vectors)] for _ in range(slots)]
    per32 = w.fmt.groups // 8
    first = x.at(group.udiv(per32), k.i64(0))
    sums_skip = (group & (per32 - 1)) * (x.sum16(1, 0) - x.sum16(0, 0))
    with k.range(0, w.blocks) as b:
        xs, ws = first + b * x.unit, w.at(chain, b)
        minima = [k.load(ws, F32x16, w.minima(v)) for v in range(w.vectors)]
        for t in range(slots):
            if per32 == 1:
                d_sum = k.load(xs, F32, x.d_sum(t))
            else:
                d_sum = k.load(xs + sums_skip, I32, x.sum16(0, t)).to(F32) * k.load(xs, F32, x.d(t))
            for v, minimum in enumerate(minima):
                acc[t][v].v = k.fma(minimum, k.splat(d_sum, LANES), acc[t][v].v)
    _store_all(k, acc, out)


def _store_all(k: Kernel, acc: list[list[Var]], out: Val) -> None:
    for i, var in enumerate(v for row in acc for v in row):
        k.store(var.v, out, 64 * i)


def _tree(k: Kernel, at: Val, chains: int, stride: int) -> Val:
    """Adds vectors that lie `stride` bytes apart, in the order of `sum_lanes`."""
    parts = [k.load(at, F32x16, i * stride) for i in range(chains)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:])]
    return parts[0]


@dataclass(frozen=True)
class Rows:
    """Which activation rows: tile i of `tiles` lies at `tile(i)`; row r < `count` makes row `target(r)` of the output."""

    first_tile: Val
    last_tile: Val
    count: Val
    tile: Callable[[Val], Val]
    target: Callable[[Val], Val]


BLOCK_TILES = 16
"""Activation tiles that run down a chain before the next one begins: its weights stay in the first-level cache."""


@dataclass(frozen=True)
class Sums:
    """Scratch memory for the chains' sums of BLOCK_TILES activation tiles: [tile][chain], a vector per slot and vector."""

    w: Unpacked
    base: Val

    @property
    def row(self) -> int:
        """Bytes between two chains of a tile."""
        return 64 * self.w.vectors * tile_slots(self.w.level)

    def at(self, tile: Val, chain: Val | int = 0) -> Val:
        chains = self.w.fmt.groups * (2 if self.w.fmt.has_minima else 1)
        return self.base + (tile * chains + chain) * self.row


def _sums_bytes(fmt: BlockFormat, level: Level) -> int:
    return BLOCK_TILES * fmt.groups * (2 if fmt.has_minima else 1) * 64 * vectors(level) * tile_slots(level)


def _run_chains(k: Kernel, w: Unpacked, rows: Rows, first_tile: Val, tiles: Val, sums: Sums) -> None:
    """All chains, one after the other, each for a block of activation tiles."""
    full = tile_slots(w.level)
    groups = k.table(w.fmt.lane_groups)
    with k.range(0, w.fmt.groups) as chain:
        group = k.load(groups + (chain << 3), I64)
        with k.range(0, tiles) as i:
            x = Packed(w.level, rows.tile(first_tile + i), w.blocks)
            out = sums.at(i, chain)
            # The last tile may have few rows: half its width then costs half its time.
            with k.either(rows.count - (first_tile + i) * full > full // 2) as (most, few):
                for branch, slots in ((most, full), (few, full // 2)):
                    with branch:
                        _chain(k, w, x, slots, chain, group, out)
                        if w.fmt.has_minima:
                            _minima_chain(k, w, x, slots, chain, group, out + w.fmt.groups * sums.row)


def _finish_tile(k: Kernel, w: Unpacked, at: Val, row: Val, n: Val, rows: Rows, out: Output, stride: int) -> None:
    """Adds a tile's chains and stores its results; `row` is the number of its first activation row."""
    with k.range(0, k.minimum(rows.count - row, tile_slots(w.level))) as slot:
        target = rows.target(row + slot)
        for v in range(w.vectors):
            place = at + (slot * w.vectors + v) * 64
            y = _tree(k, place, w.fmt.groups, stride)
            if w.fmt.has_minima:
                y = y - _tree(k, place + w.fmt.groups * stride, w.fmt.groups, stride)
            with k.when(n + LANES * v < out.n):
                out.sixteen(k, y, n + LANES * v, target)


def compute_rows(
    k: Kernel, level: Level, fmt: BlockFormat, m: Matrix, first: Val, rows: Rows, out: Output, scratch: Val, tail: bool
) -> None:
    """Stores the results of the tile of weight rows that starts at `first` for the given activation rows."""
    sums_bytes = _sums_bytes(fmt, level)
    w = Unpacked(level, fmt, scratch + sums_bytes, m.p >> 8)
    unpack(k, level, fmt, m, first, w, tail)
    sums = Sums(w, scratch)
    with k.range(rows.first_tile, rows.last_tile, BLOCK_TILES) as start:
        tiles = k.minimum(rows.last_tile - start, BLOCK_TILES)
        _run_chains(k, w, rows, start, tiles, sums)
        with k.range(0, tiles) as i:
            _finish_tile(k, w, sums.at(i), (start + i) * tile_slots(level), first, rows, out, sums.row)


DOT_ROWS = 3
"""Up to so many activation rows are computed as in decoding, one after another: unpacking costs more than it saves."""


def tile(fmt: BlockFormat, level: Level, tail: bool, k_padded: int) -> KernelDef:
    """Chunk c: tile c % n_tiles of weight rows, activation tiles [TILES_PER_CHUNK * (c // n_tiles), ...)."""
    slots = tile_slots(level)

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        m, x, count, out = Matrix.of(a), a.x, a.live_rows, Output.of(a, a.n)
        start = chunk.udiv(a.n_tiles) * TILES_PER_CHUNK
        stop = k.minimum(start + TILES_PER_CHUNK, (count + slots - 1).udiv(slots))
        size = Packed(level, x, m.p >> 8).tile_bytes
        rows = Rows(start, stop, count, lambda i: x + i * size, lambda r: r)
        first = (chunk - chunk.udiv(a.n_tiles) * a.n_tiles) * tile_rows(level)
        with k.either(count <= DOT_ROWS) as (few, many):
            with few, k.range(0, count) as t:
                span = (first, k.minimum(first + tile_rows(level), m.n))
                dot_rows(k, level, fmt, m, QuantRow(a.q + t * a.q_stride, m.p), span, out, t, tail)
            with many:
                compute_rows(k, level, fmt, m, first, rows, out, scratch, tail)

    fields = ("live_rows", "x", "q", "q_stride", "n_tiles", *MATRIX_FIELDS, *OUTPUT_FIELDS)
    return KernelDef(f"tile/{fmt.name}{'/tail' if tail else ''}", fields, body, tile_scratch(fmt, level, k_padded))
