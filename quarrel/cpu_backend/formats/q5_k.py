"""Q5_K: 256 values in 176 bytes: as Q4_K, with 256 fifth bits before the nibbles."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, six_bit_factors, split_runs
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import I8, I64, Kernel, Val, vec


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    # Bit i of a byte belongs to block i: the upper four bits of these come to where the lower four are.
    bits = [k.load(at, vec(I8, 16), 16 + o).shuffle([*range(16)] * 2).bitcast(vec(I64, 4)) for o in (0, 16)]
    bits = [b >> k.lane_constants(I64, [0, 0, 4, 4]) for b in bits]
    codes = []
    for i in range(4):
        packed = split_runs(k, at, 48 + 32 * (i // 2), 112 + 32 * (i // 2))
        nibbles = (p >> 4 if i % 2 else p & 15 for p in packed)
        low, high = (n | ((b << 4 - i).bitcast(n.type) & 16) for n, b in zip(nibbles, bits, strict=True))
        codes.append(low.concat(high))
    return Superblock(codes, six_bit_factors(k, level, at), 8)


FORMAT = BlockFormat("Q5_K", 256, 176, decode, has_minima=True, largest=31)
