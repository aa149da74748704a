"""Q8_0: 32 values in 34 bytes: scale f16, 32 signed bytes."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, f16_per_block, split_runs
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [split_runs(k, at, 34 * i + 2, 34 * (i + 4) + 2) for i in range(4)]
    return Superblock([(a.concat(b)) ^ 0x80 for a, b in codes], f16_per_block(k, level, at, 34), 8)


FORMAT = BlockFormat("Q8_0", 32, 34, decode, offset=128, largest=255)
