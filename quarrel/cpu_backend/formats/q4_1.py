"""Q4_1: 32 values in 20 bytes: scale f16, addend f16, 16 bytes of nibbles; value = scale * code + addend."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, f16_per_block, nibbles
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [nibbles(k, at, 20, 4, i) for i in range(4)]
    return Superblock(codes, f16_per_block(k, level, at, 20).concat(-f16_per_block(k, level, at, 20, 2)), 8)


FORMAT = BlockFormat("Q4_1", 32, 20, decode, has_minima=True)
