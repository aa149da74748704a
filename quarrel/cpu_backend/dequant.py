"""Packed rows back to float32: embedding rows, and the rows that exact arithmetic works on."""

from __future__ import annotations

from quarrel.cpu_backend.abi import Fields, KernelDef
from quarrel.cpu_backend.dot_row import padded_tail
from quarrel.cpu_backend.elementwise import each, f32s
from quarrel.cpu_backend.features import Level
from quarrel.cpu_backend.formats import BLOCKS, BlockFormat
from quarrel.cpu_backend.ir import F32, I16, I32, I64, Kernel, Val, vec
from quarrel.cpu_backend.vector import bf16_to_f32, to_f32

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a value of the unpacked types."""


def load_float(k: Kernel, level: Level, name: str, row: Val, offset: Val, lanes: int) -> Val:
    """float32 values of an unpacked row; `offset` is that of the same values in a float32 row."""
    if name == "F32":
        return k.load(row + offset, f32s(lanes))
    half = k.load(row + (offset >> 1), vec(I16, lanes))
    return to_f32(k, level, half) if name == "F16" else bf16_to_f32(half)


def dequantize_superblock(k: Kernel, level: Level, fmt: BlockFormat, at: Val, out: Val) -> None:
    """Stores the 256 values of the superblock at `at` as float32 at `out`: scale * (code - offset) - minimum."""
    block = fmt.decode(k, level, at)
    lane = {group: i for i, group in enumerate(fmt.lane_groups)}
    for codes, (first, second) in zip(block.codes, fmt.halves):
        for part in range(4):
            start = 32 * (first, second)[part // 2] + 16 * (part % 2)
            which = lane[start // (256 // fmt.groups)]
            q = codes.shuffle(range(16 * part, 16 * part + 16)).to(I32, unsigned=True) - fmt.offset
            value = q.to(F32) * k.splat(block.scales[which], 16)
            if block.minima is not None:
                value = value - k.splat(block.minima[which], 16)
            k.store(value, out, 4 * start)


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


def embedding(name: str, level: Level, n: int) -> KernelDef:
    """Chunk t: y[t] = scale * W[ids[t]]."""
    tail = name in BLOCKS and n % 256 != 0

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        row = a.w + k.load(a.ids + (chunk << 2), I32).to(I64) * a.row_bytes
        dequantize_row(k, level, name, row, scratch, a.n, tail)
        y, scale = a.y + chunk * (a.n << 2), a.f32("scale")
        each(k, a.n, lambda o, lanes: k.store(k.load(scratch + o, f32s(lanes)) * k.lift(scale, f32s(lanes)), y + o))

    fields = ("ids", "w", "y", "n", "row_bytes", "scale")
    return KernelDef(f"embedding/{name}{'/tail' if tail else ''}", fields, body, scratch=4 * (n + 256))
