"""TQ2_0: 256 ternary values in 66 bytes: 64 bytes of 2-bit codes, scale f16; value = scale * (code - 1)."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, f16_at, split_runs
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    low, high = split_runs(k, at, 0, 32)  # the first 32 bytes hold the first 128 values, two bits each
    codes = [((low >> 2 * i) & 3).concat((high >> 2 * i) & 3) for i in range(4)]
    return Superblock(codes, k.splat(f16_at(k, level, at, 64), 8), 8)


FORMAT = BlockFormat("TQ2_0", 256, 66, decode, offset=1, largest=3)
