"""Q4_K: 256 values in 144 bytes: d f16, dmin f16, eight six-bit scales and minima, 128 bytes of nibbles."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import PAIRED, BlockFormat, Superblock, six_bit_factors
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val
from quarrel.cpu_backend.runtime.vector import I8x64


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = []
    for n in range(2):
        packed = k.load(at, I8x64, 16 + 64 * n)
        codes += [packed & 15, packed >> 4]
    return Superblock(codes, six_bit_factors(k, level, at), 8)


FORMAT = BlockFormat("Q4_K", 256, 144, decode, has_minima=True, spans=PAIRED)
