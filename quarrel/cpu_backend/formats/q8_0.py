"""Q8_0: 32 values in 34 bytes: scale f16, 32 signed bytes."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, f16_per_block
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import I8, Kernel, Val, vec


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    def codes(i: int) -> Val:
        a, b = (k.load(at, vec(I8, 32), 34 * j + 2) for j in (2 * i, 2 * i + 1))
        return a.concat(b) ^ 0x80

    return Superblock([codes(i) for i in range(4)], f16_per_block(k, level, at, 34), 8)


FORMAT = BlockFormat("Q8_0", 32, 34, decode, offset=128, largest=255)
