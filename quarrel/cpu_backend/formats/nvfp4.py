"""NVFP4: 64 values in 36 bytes: four scales in E4M3, one for 16 values, then 8 bytes of E2M1 nibbles for each of them."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import SIXTEEN, BlockFormat, Superblock, byte_table
from quarrel.cpu_backend.formats.mxfp4 import TABLE
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I8, I32, I64, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import I8x64


def _codes(k: Kernel, level: Level, packed: Val) -> Val:
    """Low nibbles are values 0..7 of each 16, high nibbles 8..15."""
    low, high = ((packed & 15).bitcast(vec(I64, 4)), (packed >> 4).bitcast(vec(I64, 4)))
    return byte_table(k, level, TABLE, low.shuffle([0, 4, 1, 5, 2, 6, 3, 7], high).bitcast(I8x64))


def _scales(k: Kernel, e4m3: Val) -> Val:
    """Half of what the bytes stand for, as E2M1 is doubled; the sign is ignored, and 0x7F is 0 (in ggml 0xFF is not)."""
    bits = e4m3.to(I32, unsigned=True)
    code = bits & 0x7F
    # Exponent and mantissa moved to float32's; what E4M3 holds subnormal is its mantissa in units of 2^-9.
    normal = ((code << 20) + (119 << 23)).bitcast(vec(F32, e4m3.lanes))
    value = k.select(code < 8, code.to(F32) * 2.0**-10, normal)
    return k.select(bits.eq(0x7F), 0.0, value)


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [_codes(k, level, k.load(at, vec(I8, 32), 36 * i + 4)) for i in range(4)]
    scales = k.join([k.load(at, I32, 36 * i) for i in range(4)]).bitcast(vec(I8, 16))
    return Superblock(codes, _scales(k, scales.shuffle(SIXTEEN)), 16)


FORMAT = BlockFormat("NVFP4", 64, 36, decode, offset=12, groups=16, largest=24)
