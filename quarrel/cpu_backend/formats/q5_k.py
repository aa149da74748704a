"""Q5_K: 256 values in 176 bytes: as Q4_K, with 256 fifth bits before the nibbles."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import PAIRED, BlockFormat, Superblock, six_bit_factors
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import I8, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import I8x64


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    high = k.load(at, vec(I8, 32), 16)
    high = high.concat(high)
    codes = []
    for n in range(2):
        packed = k.load(at, I8x64, 48 + 64 * n)
        for low, nibble in enumerate((packed & 15, packed >> 4)):
            first, second = PAIRED[2 * n + low]
            picked = high & k.lane_constants(I8, [1 << first] * 32 + [1 << second] * 32)
            codes.append(k.select(picked.ne(0), nibble | 16, nibble))
    return Superblock(codes, six_bit_factors(k, level, at), 8)


FORMAT = BlockFormat("Q5_K", 256, 176, decode, has_minima=True, spans=PAIRED, largest=31)
