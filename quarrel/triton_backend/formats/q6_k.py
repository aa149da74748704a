"""Q6_K: 256 codes of 6 bits less 32; a signed byte for 16 of them, times a float16 for all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats import float16_codes, fragment_codes, int8_dots, ring_codes
from quarrel.triton_backend.formats.fields import load_nibbles, load_two_bits, nibbles, unshift, view, words
from quarrel.triton_backend.formats.layout import (
    NIBBLES,
    TWO_BITS,
    BlockFormat,
    Dots,
    Float16,
    Fragments,
    Plane,
    Ring,
    Split,
)
from quarrel.triton_backend.formats.q4_k import load_5


def split(raw: torch.Tensor) -> Split:
    rows, blocks, _ = raw.shape
    codes = unshift(raw[..., :128].view(rows, blocks, 2, 64), (0, 4), 15).reshape(rows, blocks, 8, 32)
    upper = unshift(raw[..., 128:192].view(rows, blocks, 2, 32), (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 32)
    return nibbles(codes), words(upper, 2), view(raw, 192, 208, torch.int8), view(raw, 208, 210, torch.float16)


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    up = row[:, None] * (K // 256) + (block // 8)[None, :]  # [R, B]
    d = tl.load(w.top + up, mask=ok, other=0.0).to(tl.float32)
    s_low = (tl.load(w.scale + at * 2, mask=ok, other=0).to(tl.float32) * d)[:, :, None]
    s_high = (tl.load(w.scale + at * 2 + 1, mask=ok, other=0).to(tl.float32) * d)[:, :, None]
    low, high = load_nibbles(w.codes, at, ok)
    u_low, u_high = load_two_bits(w.bits, at, ok)
    return (low + u_low * 16 - 32).to(tl.float32) * s_low, (high + u_high * 16 - 32).to(tl.float32) * s_high


@triton.jit
def _two_bits(word, i, codes):
    """Four codes with upper bits 2 * (columns 4i..4i+3) of `word` over them."""
    y = (word >> (8 * i)) & 255
    y = (y * 0x1001) & 0x000F000F
    return codes | ((y * 0x410) & 0x30303030)


@triton.jit
def products(FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """Each half of a block has a scale, and 32 is taken off by the sums of x."""
    a, b, c, d, e, f, g, h = int8_dots.split_nibbles(q, R, W)
    word = upper.to(tl.int32)
    a, b, c, d = _two_bits(word, 0, a), _two_bits(word, 1, b), _two_bits(word, 2, c), _two_bits(word, 3, d)
    word = (upper >> 32).to(tl.int32)
    e, f, g, h = _two_bits(word, 0, e), _two_bits(word, 1, f), _two_bits(word, 2, g), _two_bits(word, 3, h)
    low, high = int8_dots.half_blocks((a, b, c, d, e, f, g, h), x, R, W, False, ASM)
    low -= 32 * x[17]
    high -= 32 * x[18]
    pair = scales.to(tl.int32)
    s_low, s_high = ((pair << 24) >> 24).to(tl.float32), (pair >> 8).to(tl.float32)
    return (low.to(tl.float32) * s_low + high.to(tl.float32) * s_high) * (tops.to(tl.float32) * x[16])


@triton.jit
def decode16(FORMAT: tl.constexpr, w, row, first, K, R: tl.constexpr, B: tl.constexpr):
    at = float16_codes.blocks_at(row, first, K, B)
    q = float16_codes.load_codes(w.codes, row, first, K, R, B)
    s = tl.load(w.scale.to(tl.pointer_type(tl.int16)) + at)
    # Two of these to a word: a load of two bytes would not be in the pipeline.
    up = float16_codes.tops_at(row, first, K, B)
    t = tl.load(w.top.to(tl.pointer_type(tl.int32)) + up // 2) >> (up % 2 * 16).to(tl.int32)
    bits = tl.load(w.bits + row[:, None] * (K // 16) + (first * 2 + tl.arange(0, B * 2))[None, :])
    low, high = float16_codes.six_bits(q, bits, R, B)
    d, _ = float16_codes.pair(float16_codes.spread_tops(t, R, B))
    both, d = s.to(tl.int32), d.to(tl.float32)
    s_low = (((both << 24) >> 24).to(tl.float32) * d).to(tl.float16)
    s_high = ((both >> 8).to(tl.float32) * d).to(tl.float16)
    return float16_codes.flat(float16_codes.times(low, s_low, R, B, 16), float16_codes.times(high, s_high, R, B, 16), R, B)


@gluon.jit
def scales(FORMAT: gl.constexpr, w, at, up):
    s = gl.load(w.scale.to(gl.pointer_type(gl.int16)) + at)
    a, b = gl.load(w.bits + at * 2), gl.load(w.bits + at * 2 + 1)
    return a, b, s, gl.load(w.top.to(gl.pointer_type(gl.int16)) + up)


@gluon.jit
def eight(FORMAT: gl.constexpr, q, a, b, s, t, word):
    both, d = s.to(gl.int32), fragment_codes.float16_of(t)
    s_low = fragment_codes.beside(fragment_codes.twice(((both << 24) >> 24).to(gl.float32) * d), q)
    s_high = fragment_codes.beside(fragment_codes.twice((both >> 8).to(gl.float32) * d), q)
    low, high = fragment_codes.of_words(a, q, word * 8) & 255, fragment_codes.of_words(b, q, word * 8) & 255
    return fragment_codes.six(q, s_low, s_high, low, high)


# $4 scales of low and of high columns (signed bytes), $5 d * 2^24 twice: the first * 2^24, the second * 2^20, -32 each.
_RING_SCALES = gl.constexpr(
    "{ .reg .b32 a, b; xor.b32 a, $4, 0x8080; prmt.b32 a, a, 0x64646464, 0x4140; mov.b32 b, 0x64806480; "
    "sub.f16x2 a, a, b; mul.rn.f16x2 a, a, $5; prmt.b32 $0, a, a, 0x1010; prmt.b32 $1, a, a, 0x3232; "
    "mov.b32 a, 0x80208020; mul.rn.f16x2 $2, $0, a; mul.rn.f16x2 $3, $1, a; "
    "mov.b32 a, 0x2C002C00; mul.rn.f16x2 $1, $1, a; }"
)


@gluon.jit
def ring_factors(FORMAT: gl.constexpr, s, t, down):
    top = fragment_codes.twice(fragment_codes.float16_of(t) * (16777216.0 * down))
    return gl.inline_asm_elementwise(
        _RING_SCALES, "=r,=r,=r,=r,r,r", [s.to(gl.int32), top], dtype=(gl.int32,) * 4, is_pure=True, pack=1
    )


@gluon.jit
def ring_eight(FORMAT: gl.constexpr, q, r, a, b, c, d, u, v, word):
    low, high = (u[:, :, None] >> (word * 8)) & 255, (v[:, :, None] >> (word * 8)) & 255
    return ring_codes.six(q, a, b, c, d, low, high)


def ring_shift(scale: torch.Tensor, top: torch.Tensor) -> int:
    return ring_codes.shift_for(scale.reshape(-1, 16).float().abs().amax(1) * top.reshape(-1).float().abs())


Q6_K = BlockFormat(
    GGMLType.Q6_K, split, decode, NIBBLES, TWO_BITS, Plane(torch.int8, 2), Plane(torch.float16, 1, 256),
    Dots(load_5, products, views=(torch.int32, torch.int64, torch.int16, None)), Float16(decode16),
    Fragments(scales, eight), Ring(ring_factors, ring_eight, ring_shift),
)  # fmt: skip
