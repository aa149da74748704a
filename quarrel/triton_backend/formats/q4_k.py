"""Q4_K, Q5_K: 256 codes of 4 or 5 bits; a 6-bit scale and minimum for 32 of them, times a float16 for all each.

Packing widens the 6-bit scales to bytes, 2.8% of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats import float16_codes, fragment_codes, int8_dots, ring_codes
from quarrel.triton_backend.formats.fields import float16_at, load_nibbles, load_one_bit, nibbles, unshift, view, words
from quarrel.triton_backend.formats.layout import (
    BYTE_SCALES,
    NIBBLES,
    ONE_BIT,
    BlockFormat,
    Dots,
    Float16,
    Fragments,
    Plane,
    Ring,
    Split,
)
from quarrel.triton_backend.formats.q4_0 import ring_five, ring_four


def _scales(s: torch.Tensor) -> torch.Tensor:
    """12 bytes of a super-block to `[..., 8, 2]`: scale and minimum of each block of 32."""
    a, b, c = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scale = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], -1)
    minimum = torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], -1)
    return torch.stack([scale, minimum], -1)


def split_q4(raw: torch.Tensor) -> Split:
    rows, blocks, _ = raw.shape
    codes = unshift(raw[..., 16:].view(rows, blocks, 4, 32), (0, 4), 15)  # [rows, blocks, 4, 2, 32]
    return nibbles(codes), None, _scales(raw[..., 4:16]), view(raw, 0, 4, torch.float16)


def split_q5(raw: torch.Tensor) -> Split:
    rows, blocks, _ = raw.shape
    codes = unshift(raw[..., 48:].view(rows, blocks, 4, 32), (0, 4), 15)
    fifth = unshift(raw[..., 16:48], (0, 1, 2, 3, 4, 5, 6, 7), 1)  # [rows, blocks, 8, 32]
    return nibbles(codes), words(fifth, 1), _scales(raw[..., 4:16]), view(raw, 0, 4, torch.float16)


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    up = row[:, None] * (K // 256) + (block // 8)[None, :]  # [R, B]
    d = tl.load(w.top + up * 2, mask=ok, other=0.0).to(tl.float32)
    dmin = tl.load(w.top + up * 2 + 1, mask=ok, other=0.0).to(tl.float32)
    s = (tl.load(w.scale + at * 2, mask=ok, other=0).to(tl.float32) * d)[:, :, None]
    m = (tl.load(w.scale + at * 2 + 1, mask=ok, other=0).to(tl.float32) * dmin)[:, :, None]
    low, high = load_nibbles(w.codes, at, ok)
    if FORMAT == "Q5_K":
        low_5, high_5 = load_one_bit(w.bits, at, ok)
        low, high = low + low_5 * 16, high + high_5 * 16
    return low.to(tl.float32) * s - m, high.to(tl.float32) * s - m


@triton.jit
def load_4(w, n, first, N, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    q = int8_dots.load_codes(w.codes, n, start, K // 8, W)
    scales = int8_dots.load_blocks(w.scale, n, start, K, W, ASM)
    return q, 0, scales, int8_dots.load_tops(w.top, first, N, start, K, R, W)


@triton.jit
def load_5(w, n, first, N, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """For every format with a plane of upper bits and one of tops."""
    q = int8_dots.load_codes(w.codes, n, start, K // 8, W)
    scales = int8_dots.load_blocks(w.scale, n, start, K, W, ASM)
    upper = int8_dots.load_blocks(w.bits, n, start, K, W, ASM)
    return q, upper, scales, int8_dots.load_tops(w.top, first, N, start, K, R, W)


@triton.jit
def products(FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    codes = int8_dots.split_nibbles(q, R, W)
    if FORMAT == "Q5_K":
        codes = int8_dots.fifth_bits(codes, upper)
    total = int8_dots.whole_block(codes, x, R, W, False, ASM)
    pair = scales.to(tl.int32)
    m = ((pair >> 8) & 255).to(tl.float32) * (float16_at(tops >> 16) * (x[17] + x[18]).to(tl.float32))
    return ((pair & 255).to(tl.float32) * (float16_at(tops) * total.to(tl.float32)) - m) * x[16]


@triton.jit
def decode16(FORMAT: tl.constexpr, w, row, first, K, R: tl.constexpr, B: tl.constexpr):
    """Codes less the middle of their range: what is added then is small, and its rounding with it."""
    MIDDLE: tl.constexpr = 8.0 if FORMAT == "Q4_K" else 16.0
    at = float16_codes.blocks_at(row, first, K, B)
    q = float16_codes.load_codes(w.codes, row, first, K, R, B)
    s = tl.load(w.scale.to(tl.pointer_type(tl.int16)) + at)
    t = tl.load(w.top.to(tl.pointer_type(tl.int32)) + float16_codes.tops_at(row, first, K, B))
    if FORMAT == "Q5_K":
        bits = tl.load(w.bits + at)
    d, dmin = float16_codes.pair(float16_codes.spread_tops(t, R, B))
    both = s.to(tl.int32)
    step = (both & 255).to(tl.float32) * d.to(tl.float32)
    m = (MIDDLE * step - ((both >> 8) & 255).to(tl.float32) * dmin.to(tl.float32)).to(tl.float16)
    d = step.to(tl.float16)
    if FORMAT == "Q5_K":
        low, high = float16_codes.five_bits(q, bits, R, B)
    else:
        low, high = float16_codes.four_bits(q, R, B)
    return float16_codes.flat(float16_codes.times_plus(low, d, m, R, B), float16_codes.times_plus(high, d, m, R, B), R, B)


@gluon.jit
def scales(FORMAT: gl.constexpr, w, at, up):
    s = gl.load(w.scale.to(gl.pointer_type(gl.int16)) + at)
    t = gl.load(w.top.to(gl.pointer_type(gl.int32)) + up)
    a = t
    if FORMAT == "Q5_K":
        a = gl.load(w.bits + at)
    return a, a, s, t


@gluon.jit
def eight(FORMAT: gl.constexpr, q, a, b, s, t, word):
    MIDDLE: gl.constexpr = 8.0 if FORMAT == "Q4_K" else 16.0
    both = s.to(gl.int32)
    d = fragment_codes.float16_of(t)
    step = (both & 255).to(gl.float32) * d
    m = MIDDLE * step - ((both >> 8) & 255).to(gl.float32) * fragment_codes.float16_of(t >> 16)
    d = fragment_codes.beside(fragment_codes.twice(step), q)
    m = fragment_codes.beside(fragment_codes.twice(m), q)
    if FORMAT == "Q4_K":
        made = fragment_codes.four(q, d, m)
    else:
        low, high = fragment_codes.of_words(a, q, word * 4) & 15, fragment_codes.of_words(a, q, word * 4 + 16) & 15
        made = fragment_codes.five(q, d, m, low, high)
    return made


# $3 scale and minimum (bytes), $4 d * 2^24 and -dmin * 2^8 (float16): scale * 2^24, scale * 2^20, -minimum, twice each.
_RING_SCALES = gl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $3, 0x64646464, 0x4140; mov.b32 b, 0x64006400; "
    "sub.f16x2 a, a, b; mul.rn.f16x2 a, a, $4; prmt.b32 $0, a, a, 0x1010; prmt.b32 b, a, a, 0x3232; "
    "mov.b32 a, 0x1C001C00; mul.rn.f16x2 $2, b, a; mov.b32 a, 0x2C002C00; mul.rn.f16x2 $1, $0, a; }"
)


@gluon.jit
def ring_factors(FORMAT: gl.constexpr, s, t, down):
    top = ring_codes.packed(
        fragment_codes.float16_of(t) * (16777216.0 * down), fragment_codes.float16_of(t >> 16) * (-256.0 * down)
    )
    a, b, c = gl.inline_asm_elementwise(
        _RING_SCALES, "=r,=r,=r,r,r", [s.to(gl.int32), top], dtype=(gl.int32,) * 3, is_pure=True, pack=1
    )
    return a, b, c, c


def ring_shift(scale: torch.Tensor, top: torch.Tensor) -> int:
    most = scale.reshape(-1, 8, 2)[..., 0].amax(1).float() * top.reshape(-1, 2)[:, 0].float().abs()
    return ring_codes.shift_for(most)


_TOP = Plane(torch.float16, 2, 256)
_VIEWS = (torch.int32, None, torch.int16, torch.int32)
Q4_K = BlockFormat(
    GGMLType.Q4_K, split_q4, decode, NIBBLES, scale=BYTE_SCALES, top=_TOP, dots=Dots(load_4, products, views=_VIEWS),
    float16=Float16(decode16), fragments=Fragments(scales, eight), ring=Ring(ring_factors, ring_four, ring_shift),
)  # fmt: skip
Q5_K = BlockFormat(
    GGMLType.Q5_K, split_q5, decode, NIBBLES, ONE_BIT, BYTE_SCALES, _TOP, Dots(load_5, products, views=_VIEWS),
    Float16(decode16), Fragments(scales, eight), Ring(ring_factors, ring_five, ring_shift),
)  # fmt: skip
