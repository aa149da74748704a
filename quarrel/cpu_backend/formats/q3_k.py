"""Q3_K: 256 values in 110 bytes: 256 third bits, 64 bytes of 2-bit codes, 16 six-bit scales, d f16."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import SIXTEEN, BlockFormat, Superblock, f16_at, two_bits
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I8, I32, I64, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import I8x64


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    high = k.load(at, vec(I8, 32), 0)
    words = high.concat(high).bitcast(vec(I64, 8))
    # Of span j of 32 values bit j is the third one: it is moved to where it belongs.
    moved = [words << k.lane_constants(I64, [2] * 4 + [1] * 4)]
    moved += [words >> k.lane_constants(I64, [2 * i - 2] * 4 + [2 * i - 1] * 4) for i in range(1, 4)]
    codes = [code | (third.bitcast(I8x64) & 4) for code, third in zip(two_bits(k, at, 32), moved, strict=True)]
    low = k.load(at, vec(I8, 8), 96)
    top = k.splat(k.load(at, I32, 104), 4) >> k.lane_constants(I32, [0, 2, 4, 6])
    six = (low & 15).concat(low >> 4) | (top & 0x03030303).bitcast(vec(I8, 16)) << 4
    scales = (six - 32).shuffle(SIXTEEN).to(I32).to(F32)
    return Superblock(codes, scales * f16_at(k, level, at, 108), 16)


FORMAT = BlockFormat("Q3_K", 256, 110, decode, offset=4, groups=16, largest=7)
