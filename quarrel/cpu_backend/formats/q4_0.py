"""Q4_0: 32 values in 18 bytes: scale f16, 16 bytes of nibbles; value = scale * (code - 8)."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, f16_per_block, nibbles
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    return Superblock([nibbles(k, at, 18, 2, i) for i in range(4)], f16_per_block(k, level, at, 18), 8)


FORMAT = BlockFormat("Q4_0", 32, 18, decode, offset=8)
