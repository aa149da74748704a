"""Q4_0, Q5_0: 32 codes of 4 or 5 bits less the middle of their range, and a float16 scale."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats import float16_codes, fragment_codes, int8_dots, ring_codes
from quarrel.triton_backend.formats.fields import load_float, load_nibbles, load_one_bit, view
from quarrel.triton_backend.formats.layout import (
    NIBBLES,
    ONE_BIT,
    ONE_SCALE,
    BlockFormat,
    Dots,
    Float16,
    Fragments,
    Ring,
    Split,
)


def split_q4(raw: torch.Tensor) -> Split:
    """A float16, then nibbles in the planes' own order."""
    return raw[..., 2:], None, view(raw, 0, 2, torch.float16), None


def split_q5(raw: torch.Tensor) -> Split:
    return raw[..., 6:], view(raw, 2, 6, torch.int32), view(raw, 0, 2, torch.float16), None


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    d = load_float(w.scale, at, ok)
    low, high = load_nibbles(w.codes, at, ok)
    if FORMAT == "Q5_0":
        low_5, high_5 = load_one_bit(w.bits, at, ok)
        low, high = low + low_5 * 16 - 16, high + high_5 * 16 - 16
    else:
        low, high = low - 8, high - 8
    return low.to(tl.float32) * d, high.to(tl.float32) * d


@triton.jit
def load_4(w, n, first, N, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    q = int8_dots.load_codes(w.codes, n, start, K // 8, W)
    return q, 0, int8_dots.load_blocks(w.scale, n, start, K, W, ASM), 0


@triton.jit
def load_5(w, n, first, N, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    q, _, scales, _ = load_4(w, n, first, N, start, K, R, W, ASM)
    return q, int8_dots.load_blocks(w.bits, n, start, K, W, ASM), scales, 0


@triton.jit
def products(FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    codes = int8_dots.split_nibbles(q, R, W)
    if FORMAT == "Q5_0":
        codes = int8_dots.fifth_bits(codes, upper)
    total = int8_dots.whole_block(codes, x, R, W, False, ASM)
    MIDDLE: tl.constexpr = 16 if FORMAT == "Q5_0" else 8
    return (total - MIDDLE * (x[17] + x[18])).to(tl.float32) * (scales.to(tl.float32) * x[16])


@triton.jit
def decode16(FORMAT: tl.constexpr, w, row, first, K, R: tl.constexpr, B: tl.constexpr):
    at = float16_codes.blocks_at(row, first, K, B)
    q = float16_codes.load_codes(w.codes, row, first, K, R, B)
    s = tl.load(w.scale + at)
    if FORMAT == "Q5_0":
        low, high = float16_codes.five_bits(q, tl.load(w.bits + at), R, B)
    else:
        low, high = float16_codes.four_bits(q, R, B)
    return float16_codes.flat(float16_codes.times(low, s, R, B, 16), float16_codes.times(high, s, R, B, 16), R, B)


@gluon.jit
def scales(FORMAT: gl.constexpr, w, at, up):
    s = gl.load(w.scale + at)
    return s, s, s, s


@gluon.jit
def eight(FORMAT: gl.constexpr, q, a, b, s, t, word):
    d = fragment_codes.beside(fragment_codes.twice(s.to(gl.float32)), q)
    return fragment_codes.four(q, d, d * 0)


@gluon.jit
def ring_factors(FORMAT: gl.constexpr, s, t, down):
    MIDDLE: gl.constexpr = 16.0 if FORMAT == "Q5_0" else 8.0
    return ring_codes.centred(s, down, MIDDLE)


@gluon.jit
def ring_four(FORMAT: gl.constexpr, q, r, a, b, c, d, u, v, word):
    """For every format with nibbles alone."""
    return ring_codes.four(q, a, b, c)


@gluon.jit
def ring_five(FORMAT: gl.constexpr, q, r, a, b, c, d, u, v, word):
    """For every format with a fifth bit."""
    low, high = (u[:, :, None] >> (word * 4)) & 15, (u[:, :, None] >> (word * 4 + 16)) & 15
    return ring_codes.five(q, a, b, c, d, low, high)


Q4_0 = BlockFormat(
    GGMLType.Q4_0, split_q4, decode, NIBBLES, scale=ONE_SCALE, dots=Dots(load_4, products), float16=Float16(decode16),
    fragments=Fragments(scales, eight), ring=Ring(ring_factors, ring_four, ring_codes.shift_of_scales),
)  # fmt: skip
Q5_0 = BlockFormat(
    GGMLType.Q5_0, split_q5, decode, NIBBLES, ONE_BIT, ONE_SCALE, dots=Dots(load_5, products), float16=Float16(decode16),
    ring=Ring(ring_factors, ring_five, ring_codes.shift_of_scales),
)  # fmt: skip
