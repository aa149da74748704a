"""Q4_K: 256 values in 144 bytes: d f16, dmin f16, eight six-bit scales and minima, 128 bytes of nibbles."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, six_bit_factors, split_runs
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import Kernel, Val


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = []
    for n in range(2):
        low, high = split_runs(k, at, 16 + 32 * n, 80 + 32 * n)
        codes += [(low & 15).concat(high & 15), (low >> 4).concat(high >> 4)]
    return Superblock(codes, six_bit_factors(k, level, at), 8)


FORMAT = BlockFormat("Q4_K", 256, 144, decode, has_minima=True)
