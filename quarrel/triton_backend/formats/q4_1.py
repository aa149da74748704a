"""Q4_1, Q5_1: 32 codes of 4 or 5 bits, a float16 scale and a float16 minimum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats import float16_codes, int8_dots
from quarrel.triton_backend.formats.fields import float16_at, load_float, load_nibbles, load_one_bit, view
from quarrel.triton_backend.formats.layout import NIBBLES, ONE_BIT, TWO_SCALES, BlockFormat, Dots, Float16, Split
from quarrel.triton_backend.formats.q4_0 import load_4, load_5


def split_q4(raw: torch.Tensor) -> Split:
    return raw[..., 4:], None, view(raw, 0, 4, torch.float16), None


def split_q5(raw: torch.Tensor) -> Split:
    return raw[..., 8:], view(raw, 4, 8, torch.int32), view(raw, 0, 4, torch.float16), None


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    d, m = load_float(w.scale, at * 2, ok), load_float(w.scale, at * 2 + 1, ok)
    low, high = load_nibbles(w.codes, at, ok)
    if FORMAT == "Q5_1":
        low_5, high_5 = load_one_bit(w.bits, at, ok)
        low, high = low + low_5 * 16, high + high_5 * 16
    return low.to(tl.float32) * d + m, high.to(tl.float32) * d + m


@triton.jit
def products(FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    codes = int8_dots.split_nibbles(q, R, W)
    if FORMAT == "Q5_1":
        codes = int8_dots.fifth_bits(codes, upper)
    total = int8_dots.whole_block(codes, x, R, W, False, ASM).to(tl.float32)
    return (float16_at(scales) * total + float16_at(scales >> 16) * (x[17] + x[18]).to(tl.float32)) * x[16]


@triton.jit
def decode16(FORMAT: tl.constexpr, w, row, first, K, R: tl.constexpr, B: tl.constexpr):
    """Codes less the middle of their range: what is added then is small, and its rounding with it."""
    MIDDLE: tl.constexpr = 8.0 if FORMAT == "Q4_1" else 16.0
    at = float16_codes.blocks_at(row, first, K, B)
    q = float16_codes.load_codes(w.codes, row, first, K, R, B)
    d, m = float16_codes.pair(tl.load(w.scale.to(tl.pointer_type(tl.int32)) + at))
    if FORMAT == "Q5_1":
        bits = tl.load(w.bits + at)
    m = (m.to(tl.float32) + MIDDLE * d.to(tl.float32)).to(tl.float16)
    if FORMAT == "Q5_1":
        low, high = float16_codes.five_bits(q, bits, R, B)
    else:
        low, high = float16_codes.four_bits(q, R, B)
    return float16_codes.flat(float16_codes.times_plus(low, d, m, R, B), float16_codes.times_plus(high, d, m, R, B), R, B)


_VIEWS = (torch.int32, None, torch.int32, None)
Q4_1 = BlockFormat(
    GGMLType.Q4_1, split_q4, decode, NIBBLES, scale=TWO_SCALES, dots=Dots(load_4, products, views=_VIEWS),
    float16=Float16(decode16),
)  # fmt: skip
Q5_1 = BlockFormat(
    GGMLType.Q5_1, split_q5, decode, NIBBLES, ONE_BIT, TWO_SCALES, dots=Dots(load_5, products, views=_VIEWS),
    float16=Float16(decode16),
)  # fmt: skip
