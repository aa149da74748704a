"""Q5_1: 32 values in 24 bytes: scale f16, addend f16, 32 fifth bits, nibbles; value = scale * code + addend."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, f16_per_block, fifth_bits, nibbles
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [fifth_bits(k, at, 24, 4, i, nibbles(k, at, 24, 8, i)) for i in range(4)]
    return Superblock(codes, f16_per_block(k, level, at, 24).concat(-f16_per_block(k, level, at, 24, 2)), 8)


FORMAT = BlockFormat("Q5_1", 32, 24, decode, has_minima=True, largest=31)
