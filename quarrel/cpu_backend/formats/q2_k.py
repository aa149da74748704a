"""Q2_K: 256 values in 84 bytes: 16 nibbles of scale and of minimum, 64 bytes of 2-bit codes, d f16, dmin f16."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import SIXTEEN, BlockFormat, Superblock, f16_at, two_bits
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I8, I32, Kernel, Val, vec


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    both = k.load(at, vec(I8, 16), 0).shuffle(SIXTEEN)
    scales, minima = ((x.to(I32, unsigned=True)).to(F32) for x in (both & 15, both >> 4))
    factors = (scales * f16_at(k, level, at, 80)).concat(minima * f16_at(k, level, at, 82))
    return Superblock(two_bits(k, at, 16), factors, 16)


FORMAT = BlockFormat("Q2_K", 256, 84, decode, groups=16, has_minima=True, largest=3)
