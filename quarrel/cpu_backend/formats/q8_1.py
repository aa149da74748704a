"""Q8_1: 32 values in 36 bytes: scale f16, addend f16, 32 bytes; value = scale * code + addend."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, f16_per_block, split_runs
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [split_runs(k, at, 36 * i + 4, 36 * (i + 4) + 4) for i in range(4)]
    factors = f16_per_block(k, level, at, 36).concat(-f16_per_block(k, level, at, 36, 2))
    return Superblock([a.concat(b) for a, b in codes], factors, 8)


FORMAT = BlockFormat("Q8_1", 32, 36, decode, has_minima=True, largest=255)
