"""IQ4_XS: 256 values in 136 bytes: d f16, eight six-bit scales, 128 bytes of nibbles that index IQ4_NL's table."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, byte_table, f16_at, nibbles
from quarrel.cpu_backend.formats.iq4_nl import TABLE
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I16, I32, Kernel, Val


def decode(k: Kernel, level: Level, at: Val) -> Superblock:
    codes = [byte_table(k, level, TABLE, nibbles(k, at, 16, 8, i)) for i in range(4)]
    lanes = k.lane_constants(I32, range(8))
    low = k.splat(k.load(at, I32, 4), 8) >> (lanes << 2) & 15
    high = k.splat(k.load(at, I16, 2).to(I32, unsigned=True), 8) >> (lanes << 1) & 3
    scales = ((low | high << 4) - 32).to(F32)
    return Superblock(codes, scales * f16_at(k, level, at, 0), 8)


FORMAT = BlockFormat("IQ4_XS", 256, 136, decode, offset=127, largest=240)
