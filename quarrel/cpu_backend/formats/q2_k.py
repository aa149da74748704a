"""Q2_K: 256 values in 84 bytes: 16 nibbles of scale and of minimum, 64 bytes of 2-bit codes, d f16, dmin f16."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, split_runs
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I8, I16, I64, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import f16_to_f32


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    """Codes of every second 32 values stay where they are, four times as large, and the scales of the others are."""
    codes = []
    for shift in (0, 4):
        parts = [(v.bitcast(vec(I64, 4)) >> shift).bitcast(vec(I8, 32)) for v in split_runs(k, at, 16, 48)]
        codes += [(parts[0] & mask).concat(parts[1] & mask) for mask in (3, 12)]
    both = k.load(at, vec(I8, 16)).to(I16, unsigned=True)
    scales = (both & 15) * k.lane_constants(I16, [4, 4, 1, 1] * 4)
    factors = f16_to_f32(k, level, k.load(at, vec(I16, 2), 80)) * k.lane_constants(F32, [0.25, -1.0])
    return Superblock(codes, factors, 8, scales, both >> 4)


FORMAT = BlockFormat("Q2_K", 256, 84, decode, has_minima=True, largest=12, product=45)
