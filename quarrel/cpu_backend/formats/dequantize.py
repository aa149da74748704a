"""Weight rows of any native type as float32."""

from __future__ import annotations

from quarrel.cpu_backend.formats.block import BlockFormat, Superblock, padded_tail
from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I16, I32, Kernel, Val, vec
from quarrel.cpu_backend.runtime.vector import bf16_to_f32, each, f16_to_f32, f32s

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a value of the unpacked types."""


def load_float(k: Kernel, level: Level, name: str, row: Val, offset: Val, lanes: int) -> Val:
    """float32 values of an unpacked row; `offset` is that of the same values in a float32 row."""
    if name == "F32":
        return k.load(row + offset, f32s(lanes))
    bits = k.load(row + (offset >> 1), vec(I16, lanes))
    return f16_to_f32(k, level, bits) if name == "F16" else bf16_to_f32(bits)


def dequantize_superblock(k: Kernel, level: Level, fmt: BlockFormat, at: Val, out: Val) -> None:
    """Stores the 256 values of the superblock at `at` as float32 at `out`: scale * (code - offset) - minimum."""
    block = fmt.decode(k, level, at)
    lane = {group: i for i, group in enumerate(fmt.lane_groups)}
    scales, minima = _group_factors(block)
    for codes, runs in zip(block.codes, fmt.runs, strict=True):
        for part, run in enumerate(runs):
            which = run if fmt.product else lane[16 * run // (256 // fmt.groups)]
            q = codes.shuffle(range(16 * part, 16 * part + 16)).to(I32, unsigned=True) - fmt.offset
            value = q.to(F32) * k.splat(scales[which], 16)
            if minima is not None:
                value = value - k.splat(minima[which], 16)
            k.store(value, out, 64 * run)


def _group_factors(block: Superblock) -> tuple[Val, Val | None]:
    """Scales and minima as float32; integer ones times their factors."""
    if block.scales16 is None:
        return block.scales, block.minima
    scales, minima = (v.to(F32) for v in block.integers)
    return scales * block.factors[0], minima * -block.factors[1]


def dequantize_row(k: Kernel, level: Level, name: str, row: Val, out: Val, n: Val, tail: bool) -> None:
    """Stores a row of `n` values of any native type at `out`; with a tail, up to 255 more values are written."""
    if name in FLOATS:
        each(k, n, lambda o, lanes: k.store(load_float(k, level, name, row, o, lanes), out + o))
        return
    fmt = BLOCKS[name]
    with k.range(0, n >> 8) as b:
        dequantize_superblock(k, level, fmt, row + b * fmt.superblock_bytes, out + (b << 10))
    if tail:
        whole = n >> 8
        rest = padded_tail(k, fmt, row + whole * fmt.superblock_bytes, (n & 255).udiv(fmt.elements))
        dequantize_superblock(k, level, fmt, rest, out + (whole << 10))
