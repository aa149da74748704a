"""Q6_K: 256 values in 210 bytes: 128 bytes of nibbles, 64 of upper two bits, 16 signed scales, d f16."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import SIXTEEN, BlockFormat, Superblock, f16_at
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I8, I32, I64, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import I8x64


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = []
    for n in range(2):
        low = k.load(at, I8x64, 64 * n)
        high = k.load(at, vec(I8, 32), 128 + 32 * n)
        words = high.concat(high).bitcast(vec(I64, 8))
        left = words << k.lane_constants(I64, [4] * 4 + [2] * 4)
        right = words >> k.lane_constants(I64, [0] * 4 + [2] * 4)
        codes += [(low & 15) | (left.bitcast(I8x64) & 0x30), (low >> 4) | (right.bitcast(I8x64) & 0x30)]
    scales = k.load(at, vec(I8, 16), 192).shuffle(SIXTEEN).to(I32).to(F32)
    return Superblock(codes, scales * f16_at(k, level, at, 208), 16)


FORMAT = BlockFormat("Q6_K", 256, 210, decode, offset=32, groups=16, largest=63)
