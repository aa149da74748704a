"""What kernels need to know of a block format, and what several formats decode alike.

Every quantised format is read in superblocks of 256 consecutive values: one K-quant block, or eight blocks of 32. A
superblock decodes to four vectors of 64 unsigned codes, one scale per group of 32 or 16 values, and perhaps one minimum:

    value = scale[group] * (code - offset) - minimum[group]

A format with integer scales has small integers for each 16 values beside two factors of the block, and codes from zero up.
What 16 values sum up to is multiplied by their scale in integers, so that a group of 32 has one sum:

    value = d * scale[16 values] * code - dmin * minimum[16 values]

The vectors hold runs of 16 values in the order that the format's number of groups has (`SPLIT`, `WHOLE`), and scales come
in the order in which the sums of the groups come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I1, I8, I16, I32, I64, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import I8x64, f16_to_f32

WHOLE = tuple((4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3) for i in range(4))
"""Runs of 16 values, as they follow one another: for sixteen groups."""
SPLIT = tuple((2 * i, 2 * i + 8, 2 * i + 1, 2 * i + 9) for i in range(4))
"""For eight groups: the first halves of groups i and i + 4, then their second halves. A group's halves are added without a
shuffle, as are the nibbles of both kinds of formats taken apart, and the sums come out in order."""
SIXTEEN = [4 * i + part for part in range(4) for i in range(4)]
"""Lane order of sixteen groups."""


@dataclass(frozen=True)
class Superblock:
    """Decoded: codes 4 x <64 x i8>, and <groups x f32> scales followed by as many minima, if any, in lane order.

    Of a format with integer scales: d and -dmin as <2 x f32>; scales and minima are <16 x i16>, as they follow one
    another. Either the codes or the scale of 16 values are four times as large as they should be, and d is a quarter.
    """

    codes: list[Val]
    factors: Val
    groups: int
    scales16: Val | None = None
    minima16: Val | None = None

    @property
    def integers(self) -> tuple[Val, Val]:
        """Scales and minima of a format with integer scales."""
        assert self.scales16 is not None
        assert self.minima16 is not None
        return self.scales16, self.minima16

    @property
    def scales(self) -> Val:
        return self.factors.shuffle(range(self.groups))

    @property
    def minima(self) -> Val | None:
        return self.factors.shuffle(range(self.groups, 2 * self.groups)) if self.factors.lanes > self.groups else None


@dataclass(frozen=True)
class BlockFormat:
    """One block format; `decode(k, level, address)` emits the reading of one superblock."""

    name: str
    elements: int
    nbytes: int
    decode: Callable[[Kernel, Level, Val], Superblock]
    offset: int = 0
    groups: int = 8
    """Groups in a superblock: 8 of 32 values or 16 of 16."""
    has_minima: bool = False
    largest: int = 15
    """The largest code."""
    product: int = 0
    """The largest product of a code and its scale, where scales are integers of 16 values."""

    @property
    def wide(self) -> bool:
        """Codes need all eight bits."""
        return self.largest > 127

    @property
    def minimum_chains(self) -> bool:
        """Minima are added up in chains of their own."""
        return self.has_minima and not self.product

    @property
    def superblock_bytes(self) -> int:
        return self.nbytes * (256 // self.elements)

    @property
    def runs(self) -> tuple[tuple[int, int, int, int], ...]:
        """Which runs of 16 values each vector of codes holds."""
        return WHOLE if self.groups == 16 else SPLIT

    @property
    def lane_groups(self) -> list[int]:
        """The group that each lane holds."""
        return SIXTEEN if self.groups == 16 else [*range(8)]


def padded_tail(k: Kernel, fmt: BlockFormat, at: Val, blocks: Val) -> Val:
    """A copy of the last, incomplete superblock, zeros for the blocks that the row does not have."""
    buffer = k.stack(fmt.superblock_bytes)
    size = blocks * fmt.nbytes
    with k.range(0, size) as i:
        k.store(k.load(at + i, I8), buffer + i)
    with k.range(size, fmt.superblock_bytes) as i:
        k.store(k.zero(I8), buffer + i)
    return buffer


def tail_superblock(k: Kernel, level: Level, fmt: BlockFormat, at: Val, blocks: Val, end: Val) -> Superblock:
    """The last, incomplete superblock of a row, with factors of zero for the blocks that the row does not have.

    Read in place where the matrix, up to `end`, has bytes behind it: a copy takes as long as three whole superblocks.
    """
    where = k.var(at)
    with k.when(at + fmt.superblock_bytes > end):
        where.v = padded_tail(k, fmt, at, blocks)
    block = fmt.decode(k, level, where.v)
    groups = k.lane_constants(I32, fmt.lane_groups * (block.factors.lanes // fmt.groups))
    last = blocks.to(I32) * (fmt.groups * fmt.elements // 256)
    return replace(block, factors=k.select(groups < k.splat(last, groups.lanes), block.factors, 0.0))


def byte_table(k: Kernel, level: Level, table: Sequence[int], index: Val) -> Val:
    """table[index] for bytes 0..15, `index` being <64 x i8>."""
    if level.dot == "vnni512":
        return k.call("llvm.x86.avx512.pshuf.b.512", I8x64, k.lane_constants(I8, list(table) * 4), index)
    if level.dot in ("vnni256", "maddubs"):
        full = k.lane_constants(I8, list(table) * 2)
        low, high = (k.call("llvm.x86.avx2.pshuf.b", full.type, full, index.shuffle(range(h, h + 32))) for h in (0, 32))
        return low.concat(high)
    if level.dot == "sdot":
        full = k.lane_constants(I8, table)
        parts = [
            k.call("llvm.aarch64.neon.tbl1.v16i8", full.type, full, index.shuffle(range(q, q + 16)))
            for q in range(0, 64, 16)
        ]
        return parts[0].concat(parts[1]).concat(parts[2].concat(parts[3]))
    out = k.lift(table[0], index.type)
    for code in range(1, 16):
        out = k.select(index.eq(code), k.lift(table[code], index.type), out)
    return out


def f16_at(k: Kernel, level: Level, at: Val, offset: int) -> Val:
    """One float16 number of a superblock."""
    return f16_to_f32(k, level, k.load(at, I16, offset))


def per_block(k: Kernel, at: Val, stride: int, offset: int = 0) -> Val:
    """The 16 bits at `offset` of each of eight blocks.

    Each is loaded to where it belongs and blended in, an instruction for a block: loads into general registers and shifts
    there take three.
    """
    words = k.load(at, vec(I16, 8), offset)
    for block in range(1, 8):
        other = k.load(at, vec(I16, 8), stride * block + offset - 2 * block)
        words = words.shuffle([i + 8 * (i >= block) for i in range(8)], other)
    return words


def f16_per_block(k: Kernel, level: Level, at: Val, stride: int, offset: int = 0) -> Val:
    """One float16 number of each of eight blocks as <8 x f32>."""
    return f16_to_f32(k, level, per_block(k, at, stride, offset))


def split_runs(k: Kernel, at: Val, first: int, second: int) -> tuple[Val, Val]:
    """Of the 32 bytes at each of two offsets: both first halves and both second ones."""
    low, high = ((k.load(at, vec(I8, 16), first + o), k.load(at, vec(I8, 16), second + o)) for o in (0, 16))
    return low[0].concat(low[1]), high[0].concat(high[1])


def nibbles(k: Kernel, at: Val, stride: int, offset: int, i: int) -> Val:
    """Blocks i and i + 4 of 32 values: low nibbles are values 0..15 of each block, high nibbles 16..31."""
    a, b = (k.load(at, vec(I8, 16), stride * j + offset) for j in (i, i + 4))
    both = a.concat(b)
    return (both & 15).concat(both >> 4)


def fifth_bits(k: Kernel, at: Val, stride: int, offset: int, i: int, codes: Val) -> Val:
    """Adds 16 to the codes of blocks i and i + 4 where bit j of the block's 32-bit mask is set."""
    a, b = (k.load(at, I32, stride * j + offset).to(I64, unsigned=True) for j in (i, i + 4))
    low, high = ((a & m) | (b & m) << 16 for m in (0xFFFF, 0xFFFF0000))
    mask = (low | high << 16).bitcast(vec(I1, 64))
    return k.select(mask, codes | 16, codes)


def two_bits(k: Kernel, at: Val, offset: int) -> list[Val]:
    """64 bytes: each half of 32 gives four spans of 32 values, by two bits each, the lowest first."""
    out = []
    for n in range(2):
        packed = k.load(at, vec(I8, 32), offset + 32 * n)
        words = packed.concat(packed).bitcast(vec(I64, 8))
        out += [(words >> k.lane_constants(I64, [s] * 4 + [s + 2] * 4)).bitcast(I8x64) & 3 for s in (0, 4)]
    return out


def six_bit_factors(k: Kernel, level: Level, at: Val) -> Val:
    """The sixteen bytes that open a block of Q4_K and Q5_K (d, dmin, twelve of six-bit numbers) as scales and minima.

    Groups 0..3: the low six bits of bytes 4 + j (scale) and 8 + j (minimum). Groups 4..7: the low or high four bits of byte
    8 + j, above them the top two bits of bytes j (scale) and 4 + j (minimum).
    """
    head = k.load(at, vec(I8, 16))
    wanted = [(j, is_minimum) for is_minimum in (0, 1) for j in range(8)]
    low = head.shuffle([4 + j + 4 * is_minimum if j < 4 else 8 + j for j, is_minimum in wanted])
    upper = k.lane_constants(I8, [j >= 4 and is_minimum for j, is_minimum in wanted]).ne(0)
    low = k.select(upper, low >> 4, low) & k.lane_constants(I8, [63 if j < 4 else 15 for j, _ in wanted])
    top = head.shuffle([j + 4 * is_minimum for j, is_minimum in wanted]) >> 2
    top = top & k.lane_constants(I8, [0 if j < 4 else 0x30 for j, _ in wanted])
    d = f16_to_f32(k, level, k.load(at, vec(I16, 2)))
    return (low | top).to(I32, unsigned=True).to(F32) * d.shuffle([0] * 8 + [1] * 8)
