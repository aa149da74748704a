"""NVFP4: 64 codes in E2M1, an unsigned E4M3 scale for 16 of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats import float16_codes, int8_dots
from quarrel.triton_backend.formats.fields import load_nibbles, nibbles, unshift
from quarrel.triton_backend.formats.layout import BYTE_SCALES, NIBBLES, BlockFormat, Dots, Float16, Split
from quarrel.triton_backend.formats.mxfp4 import MINUS_HIGH, MINUS_LOW, PLUS_HIGH, PLUS_LOW, e2m1_twice
from quarrel.triton_backend.formats.q4_0 import load_4


def split(raw: torch.Tensor) -> Split:
    rows, blocks, _ = raw.shape
    codes = unshift(raw[..., 4:].view(rows, blocks, 4, 8), (0, 4), 15)  # [rows, blocks, 4, 2, 8]
    return nibbles(codes.reshape(rows, blocks, 2, 32)), None, raw[..., :4], None


@triton.jit
def _ue4m3(byte):
    """An int32's low byte as float16, 2^8 too small: E4M3 has float16's fields under another bias, and the sign is ignored.
    127 counts as zero, which 255 does not."""
    code = tl.where((byte & 255) == 127, 0, byte & 127)
    return (code << 7).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    # Half the scale, as codes are doubled.
    s_low = (_ue4m3(tl.load(w.scale + at * 2, mask=ok, other=0).to(tl.int32)).to(tl.float32) * 128.0)[:, :, None]
    s_high = (_ue4m3(tl.load(w.scale + at * 2 + 1, mask=ok, other=0).to(tl.int32)).to(tl.float32) * 128.0)[:, :, None]
    low, high = load_nibbles(w.codes, at, ok)
    return e2m1_twice(low) * s_low, e2m1_twice(high) * s_high


@triton.jit
def products(FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """Each half of a block has a scale."""
    codes = int8_dots.split_signed(q, PLUS_LOW, PLUS_HIGH, MINUS_LOW, MINUS_HIGH, R, W, ASM)
    low, high = int8_dots.half_blocks(codes, x, R, W, True, ASM)
    low -= 64 * x[17]
    high -= 64 * x[18]
    pair = scales.to(tl.int32)
    s_low, s_high = _ue4m3(pair).to(tl.float32), _ue4m3(pair >> 8).to(tl.float32)
    return (low.to(tl.float32) * s_low + high.to(tl.float32) * s_high) * (128.0 * x[16])


@triton.jit
def decode16(FORMAT: tl.constexpr, w, row, first, K, R: tl.constexpr, B: tl.constexpr):
    """Exact: a product has six bits, and at least 2^-10."""
    q = float16_codes.load_codes(w.codes, row, first, K, R, B)
    pair = tl.load(w.scale.to(tl.pointer_type(tl.int16)) + float16_codes.blocks_at(row, first, K, B)).to(tl.int32)
    s_low = (_ue4m3(pair).to(tl.float32) * 256.0).to(tl.float16)
    s_high = (_ue4m3(pair >> 8).to(tl.float32) * 256.0).to(tl.float16)
    low, high = float16_codes.e2m1(q, R, B)
    return float16_codes.flat(float16_codes.times(low, s_low, R, B, 16), float16_codes.times(high, s_high, R, B, 16), R, B)


NVFP4 = BlockFormat(
    GGMLType.NVFP4, split, decode, NIBBLES, scale=BYTE_SCALES, float16=Float16(decode16),
    dots=Dots(load_4, products, views=(torch.int32, None, torch.int16, None)),
)  # fmt: skip
