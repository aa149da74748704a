"""TQ2_0: 256 ternary values in 66 bytes: 64 bytes of 2-bit codes, scale f16; value = scale * (code - 1)."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, f16_at
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val
from quarrel.cpu_backend.runtime.vector import I8x64

_SPANS = ((0, 4), (1, 5), (2, 6), (3, 7))
"""The first 32 bytes hold the first 128 values, two bits each; the others the rest."""


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    packed = k.load(at, I8x64)
    codes = [packed & 3, (packed >> 2) & 3, (packed >> 4) & 3, packed >> 6]
    return Superblock(codes, k.splat(f16_at(k, level, at, 64), 8), 8)


FORMAT = BlockFormat("TQ2_0", 256, 66, decode, offset=1, largest=3, spans=_SPANS)
