"""What the kernels need to know of a block format: how 256 consecutive values of a row become bytes, scales and minima.

Every quantised format is read as runs of 256 values ("superblocks": one K-quant block, or eight 32-blocks). A superblock
decodes to four vectors of 64 unsigned codes, one scale per group of 32 or 16 values, and perhaps one minimum per group:

    value = scale[group] * (code - offset) - minimum[group]

The codes of vector i are group halves[i][0] in its low and halves[i][1] in its high 32 bytes, so that packed nibbles need
no shuffling. Scales come in *lane order*, the order in which `fold4` leaves the sums of the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from quarrel.cpu_backend.features import Level
from quarrel.cpu_backend.ir import F32, I1, I8, I16, I32, I64, Kernel, Val, vec
from quarrel.cpu_backend.vector import I8x64, to_f32

NATURAL = ((0, 1), (2, 3), (4, 5), (6, 7))


@dataclass(frozen=True)
class Superblock:
    """Decoded: codes 4 x <64 x i8>, and <groups x f32> scales followed by as many minima, if any, in lane order."""

    codes: list[Val]
    factors: Val
    groups: int

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
    halves: Sequence[tuple[int, int]] = NATURAL

    @property
    def wide(self) -> bool:
        """Codes need all eight bits."""
        return self.largest > 127

    @property
    def superblock_bytes(self) -> int:
        return self.nbytes * (256 // self.elements)

    @cached_property
    def lane_groups(self) -> list[int]:
        """The group that each lane holds."""
        if self.groups == 16:
            return [4 * i + part for part in range(4) for i in range(4)]
        return [h[0] for h in self.halves] + [h[1] for h in self.halves]


def byte_table(k: Kernel, level: Level, table: Sequence[int], index: Val) -> Val:
    """table[index] for bytes 0..15, `index` being <64 x i8>."""
    if level.dot == "vnni512":
        return k.call("llvm.x86.avx512.pshuf.b.512", I8x64, k.lane_constants(I8, list(table) * 4), index)
    if level.dot in ("vnni256", "maddubs"):
        full = k.lane_constants(I8, list(table) * 2)
        halves = [k.call("llvm.x86.avx2.pshuf.b", full.type, full, index.shuffle(range(h, h + 32))) for h in (0, 32)]
        return halves[0].concat(halves[1])
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


# Formats of 32 values: eight blocks make a superblock.


def _halves_at(k: Kernel, level: Level, at: Val, stride: int, offset: int = 0) -> Val:
    """One half-precision number per block as <8 x f32> in lane order."""
    lanes = [h[0] for h in NATURAL] + [h[1] for h in NATURAL]
    return to_f32(k, level, k.join([k.load(at, I16, stride * j + offset) for j in lanes]))


def _nibbles(k: Kernel, at: Val, stride: int, offset: int, i: int) -> Val:
    """Blocks 2i and 2i + 1: low nibbles are values 0..15 of each block, high nibbles 16..31."""
    a, b = (k.load(at, vec(I8, 16), stride * j + offset) for j in (2 * i, 2 * i + 1))
    both = a.concat(b)
    order = [*range(16), *range(32, 48), *range(16, 32), *range(48, 64)]
    return (both & 15).shuffle(order, both >> 4)


def _fifth_bits(k: Kernel, at: Val, stride: int, offset: int, i: int, codes: Val) -> Val:
    """Adds 16 where bit j of the block's 32-bit mask is set."""
    a, b = (k.load(at, I32, stride * j + offset).to(I64, unsigned=True) for j in (2 * i, 2 * i + 1))
    mask = (a | b << 32).bitcast(vec(I1, 64))
    return k.select(mask, codes | 16, codes)


def _q4_0(k: Kernel, level: Level, at: Val) -> Superblock:
    return Superblock([_nibbles(k, at, 18, 2, i) for i in range(4)], _halves_at(k, level, at, 18), 8)


def _q4_1(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [_nibbles(k, at, 20, 4, i) for i in range(4)]
    return Superblock(codes, _halves_at(k, level, at, 20).concat(-_halves_at(k, level, at, 20, 2)), 8)


def _q5_0(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [_fifth_bits(k, at, 22, 2, i, _nibbles(k, at, 22, 6, i)) for i in range(4)]
    return Superblock(codes, _halves_at(k, level, at, 22), 8)


def _q5_1(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [_fifth_bits(k, at, 24, 4, i, _nibbles(k, at, 24, 8, i)) for i in range(4)]
    return Superblock(codes, _halves_at(k, level, at, 24).concat(-_halves_at(k, level, at, 24, 2)), 8)


def _q8_0(k: Kernel, level: Level, at: Val) -> Superblock:
    def codes(i: int) -> Val:
        a, b = (k.load(at, vec(I8, 32), 34 * j + 2) for j in (2 * i, 2 * i + 1))
        return a.concat(b) ^ 0x80

    return Superblock([codes(i) for i in range(4)], _halves_at(k, level, at, 34), 8)


_IQ4 = [t + 127 for t in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)]
_E2M1 = [m + 12 for m in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)]


def _iq4_nl(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [byte_table(k, level, _IQ4, _nibbles(k, at, 18, 2, i)) for i in range(4)]
    return Superblock(codes, _halves_at(k, level, at, 18), 8)


def _mxfp4(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [byte_table(k, level, _E2M1, _nibbles(k, at, 17, 1, i)) for i in range(4)]
    lanes = [h[0] for h in NATURAL] + [h[1] for h in NATURAL]
    e = k.join([k.load(at, I8, 17 * j) for j in lanes]).to(I32, unsigned=True)
    # 2^(e - 128): the exponent field is e - 1, and the two smallest are subnormal.
    bits = k.select(e < 2, k.lift(0x00200000, e.type) << e, (e - 1) << 23)
    return Superblock(codes, bits.bitcast(vec(F32, 8)), 8)


# Formats of 256 values.


def _f16_at(k: Kernel, level: Level, at: Val, offset: int) -> Val:
    return to_f32(k, level, k.load(at, I16, offset))


_PAIRED = ((0, 2), (1, 3), (4, 6), (5, 7))
_PAIRED_LANES = [h[0] for h in _PAIRED] + [h[1] for h in _PAIRED]


def _six_bit_factors(k: Kernel, level: Level, at: Val) -> Val:
    """The sixteen bytes that open a block of Q4_K and Q5_K (d, dmin, twelve of six-bit numbers) as scales and minima.

    Groups 0..3: the low six bits of bytes 4 + j (scale) and 8 + j (minimum). Groups 4..7: the low or high four bits of byte
    8 + j, above them the top two bits of bytes j (scale) and 4 + j (minimum).
    """
    head = k.load(at, vec(I8, 16))
    wanted = [(j, is_minimum) for is_minimum in (0, 1) for j in _PAIRED_LANES]
    low = head.shuffle([4 + j + 4 * is_minimum if j < 4 else 8 + j for j, is_minimum in wanted])
    upper = k.lane_constants(I8, [j >= 4 and is_minimum for j, is_minimum in wanted]).ne(0)
    low = k.select(upper, low >> 4, low) & k.lane_constants(I8, [63 if j < 4 else 15 for j, _ in wanted])
    top = head.shuffle([j + 4 * is_minimum for j, is_minimum in wanted]) >> 2
    top = top & k.lane_constants(I8, [0 if j < 4 else 0x30 for j, _ in wanted])
    d = to_f32(k, level, k.load(at, vec(I16, 2)))
    return (low | top).to(I32, unsigned=True).to(F32) * d.shuffle([0] * 8 + [1] * 8)


def _q4_k(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = []
    for n in range(2):
        packed = k.load(at, I8x64, 16 + 64 * n)
        codes += [packed & 15, packed >> 4]
    return Superblock(codes, _six_bit_factors(k, level, at), 8)


def _q5_k(k: Kernel, level: Level, at: Val) -> Superblock:
    high = k.load(at, vec(I8, 32), 16)
    high = high.concat(high)
    codes = []
    for n in range(2):
        packed = k.load(at, I8x64, 48 + 64 * n)
        for low, nibble in enumerate((packed & 15, packed >> 4)):
            first, second = _PAIRED[2 * n + low]
            picked = high & k.lane_constants(I8, [1 << first] * 32 + [1 << second] * 32)
            codes.append(k.select(picked.ne(0), nibble | 16, nibble))
    return Superblock(codes, _six_bit_factors(k, level, at), 8)


_SIXTEEN = [4 * i + part for part in range(4) for i in range(4)]


def _q6_k(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = []
    for n in range(2):
        low = k.load(at, I8x64, 64 * n)
        high = k.load(at, vec(I8, 32), 128 + 32 * n)
        words = high.concat(high).bitcast(vec(I64, 8))
        left = words << k.lane_constants(I64, [4] * 4 + [2] * 4)
        right = words >> k.lane_constants(I64, [0] * 4 + [2] * 4)
        codes += [(low & 15) | (left.bitcast(I8x64) & 0x30), (low >> 4) | (right.bitcast(I8x64) & 0x30)]
    scales = k.load(at, vec(I8, 16), 192).shuffle(_SIXTEEN).to(I32).to(F32)
    return Superblock(codes, scales * _f16_at(k, level, at, 208), 16)


def _two_bits(k: Kernel, at: Val, offset: int) -> list[Val]:
    """The codes of Q2_K and Q3_K: 32 bytes give four runs of 32 values, by two bits each."""
    out = []
    for n in range(2):
        packed = k.load(at, vec(I8, 32), offset + 32 * n)
        words = packed.concat(packed).bitcast(vec(I64, 8))
        out += [(words >> k.lane_constants(I64, [s] * 4 + [s + 2] * 4)).bitcast(I8x64) & 3 for s in (0, 4)]
    return out


def _q2_k(k: Kernel, level: Level, at: Val) -> Superblock:
    both = k.load(at, vec(I8, 16), 0).shuffle(_SIXTEEN)
    scales, minima = ((x.to(I32, unsigned=True)).to(F32) for x in (both & 15, both >> 4))
    factors = (scales * _f16_at(k, level, at, 80)).concat(minima * _f16_at(k, level, at, 82))
    return Superblock(_two_bits(k, at, 16), factors, 16)


def _q3_k(k: Kernel, level: Level, at: Val) -> Superblock:
    high = k.load(at, vec(I8, 32), 0)
    high = high.concat(high)
    codes = []
    for i, code in enumerate(_two_bits(k, at, 32)):
        picked = high & k.lane_constants(I8, [1 << 2 * i] * 32 + [1 << 2 * i + 1] * 32)
        codes.append(k.select(picked.ne(0), code | 4, code))
    low = k.load(at, vec(I8, 8), 96)
    top = k.splat(k.load(at, I32, 104), 4) >> k.lane_constants(I32, [0, 2, 4, 6])
    six = (low & 15).concat(low >> 4) | (top & 0x03030303).bitcast(vec(I8, 16)) << 4
    scales = (six - 32).shuffle(_SIXTEEN).to(I32).to(F32)
    return Superblock(codes, scales * _f16_at(k, level, at, 108), 16)


def _iq4_xs(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [byte_table(k, level, _IQ4, _nibbles(k, at, 16, 8, i)) for i in range(4)]
    lanes = k.lane_constants(I32, [h[0] for h in NATURAL] + [h[1] for h in NATURAL])
    low = k.splat(k.load(at, I32, 4), 8) >> (lanes << 2) & 15
    high = k.splat(k.load(at, I16, 2).to(I32, unsigned=True), 8) >> (lanes << 1) & 3
    scales = ((low | high << 4) - 32).to(F32)
    return Superblock(codes, scales * _f16_at(k, level, at, 0), 8)


BLOCKS = {
    f.name: f
    for f in (
        BlockFormat("Q4_0", 32, 18, _q4_0, offset=8),
        BlockFormat("Q4_1", 32, 20, _q4_1, has_minima=True),
        BlockFormat("Q5_0", 32, 22, _q5_0, offset=16, largest=31),
        BlockFormat("Q5_1", 32, 24, _q5_1, has_minima=True, largest=31),
        BlockFormat("Q8_0", 32, 34, _q8_0, offset=128, largest=255),
        BlockFormat("IQ4_NL", 32, 18, _iq4_nl, offset=127, largest=240),
        BlockFormat("MXFP4", 32, 17, _mxfp4, offset=12, largest=24),
        BlockFormat("Q2_K", 256, 84, _q2_k, groups=16, has_minima=True, largest=3),
        BlockFormat("Q3_K", 256, 110, _q3_k, offset=4, groups=16, largest=7),
        BlockFormat("Q4_K", 256, 144, _q4_k, has_minima=True, halves=_PAIRED),
        BlockFormat("Q5_K", 256, 176, _q5_k, has_minima=True, halves=_PAIRED, largest=31),
        BlockFormat("Q6_K", 256, 210, _q6_k, offset=32, groups=16, largest=63),
        BlockFormat("IQ4_XS", 256, 136, _iq4_xs, offset=127, largest=240),
    )
}
"""Every quantised format that is computed with as it is, by its GGUF name."""
