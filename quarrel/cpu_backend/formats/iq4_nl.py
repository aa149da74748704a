"""IQ4_NL: 32 values in 18 bytes: scale f16, 16 bytes of nibbles that index a table of 16 bytes."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, byte_table, f16_per_block, nibbles
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val

TABLE = [t + 127 for t in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)]
"""The 16 values, made unsigned."""


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [byte_table(k, level, TABLE, nibbles(k, at, 18, 2, i)) for i in range(4)]
    return Superblock(codes, f16_per_block(k, level, at, 18), 8)


FORMAT = BlockFormat("IQ4_NL", 32, 18, decode, offset=127, largest=240)
