"""MXFP4: 32 values in 17 bytes: exponent of a power of two, 16 bytes of E2M1 nibbles."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, byte_table, nibbles, per_block
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I32, Kernel, Val, vec

TABLE = [m + 12 for m in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)]
"""Twice the E2M1 values, made unsigned."""


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [byte_table(k, level, TABLE, nibbles(k, at, 17, 1, i)) for i in range(4)]
    e = per_block(k, at, 17) & 0xFF
    # 2^(e - 128): the exponent field is e - 1. The two smallest are subnormal, and count as zero.
    bits = k.call("llvm.usub.sat.v8i16", e.type, e, k.lift(1, e.type)).to(I32, unsigned=True) << 23
    return Superblock(codes, bits.bitcast(vec(F32, 8)), 8)


FORMAT = BlockFormat("MXFP4", 32, 17, decode, offset=12, largest=24)
