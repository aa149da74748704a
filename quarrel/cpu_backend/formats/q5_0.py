"""Q5_0: 32 values in 22 bytes: scale f16, 32 fifth bits, 16 bytes of nibbles; value = scale * (code - 16)."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, f16_per_block, fifth_bits, nibbles
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [fifth_bits(k, at, 22, 2, i, nibbles(k, at, 22, 6, i)) for i in range(4)]
    return Superblock(codes, f16_per_block(k, level, at, 22), 8)


FORMAT = BlockFormat("Q5_0", 32, 22, decode, offset=16, largest=31)
