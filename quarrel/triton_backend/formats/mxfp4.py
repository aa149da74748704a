"""MXFP4: 32 codes in E2M1 and a power of two (E8M0)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats import float16_codes, fragment_codes, int8_dots, ring_codes
from quarrel.triton_backend.formats.fields import load_nibbles
from quarrel.triton_backend.formats.layout import NIBBLES, BlockFormat, Dots, Float16, Plane, Ring, Split
from quarrel.triton_backend.formats.q4_0 import load_4

# 64 and twice the magnitudes of E2M1 as bytes, and 64 less those.
PLUS_LOW: tl.constexpr = tl.constexpr(0x43424140)
PLUS_HIGH: tl.constexpr = tl.constexpr(0x4C484644)
MINUS_LOW: tl.constexpr = tl.constexpr(0x3D3E3F40)
MINUS_HIGH: tl.constexpr = tl.constexpr(0x34383A3C)
# Twice the magnitudes, one to a nibble.
_E2M1: tl.constexpr = tl.constexpr(0xC8643210 - (1 << 32))


def split(raw: torch.Tensor) -> Split:
    return raw[..., 1:], None, raw[..., :1], None


@triton.jit
def e2m1_twice(q):
    """Twice the values of codes, float32."""
    word = tl.full([1, 1, 1], _E2M1, tl.int32)
    twice = ((word >> ((q & 7) * 4)) & 15).to(tl.float32)
    return tl.where(q < 8, twice, -twice)


@triton.jit
def _half_scale(e):
    """2^(e - 128), as codes are doubled; the two smallest are below float32's normal numbers."""
    bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode(FORMAT: tl.constexpr, w, row, block, row_ok, at, ok, K):
    d = _half_scale(tl.load(w.scale + at, mask=ok, other=0).to(tl.int32))[:, :, None]
    low, high = load_nibbles(w.codes, at, ok)
    return e2m1_twice(low) * d, e2m1_twice(high) * d


@triton.jit
def products(FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    codes = int8_dots.split_signed(q, PLUS_LOW, PLUS_HIGH, MINUS_LOW, MINUS_HIGH, R, W, ASM)
    total = int8_dots.whole_block(codes, x, R, W, True, ASM) - 64 * (x[17] + x[18])
    return total.to(tl.float32) * (_half_scale(scales.to(tl.int32)) * x[16])


@triton.jit
def decode16(FORMAT: tl.constexpr, w, row, first, K, R: tl.constexpr, B: tl.constexpr):
    at = float16_codes.blocks_at(row, first, K, B)
    q = float16_codes.load_codes(w.codes, row, first, K, R, B)
    s = tl.load(w.scale + at)
    low, high = float16_codes.e2m1(q, R, B)
    # Beyond these a weight is no number of float16: 2^-25 makes zeros, 2^15 times 6 is infinite.
    e = tl.minimum(tl.maximum(s.to(tl.int32), 102), 142)
    power = ((e << 23).to(tl.float32, bitcast=True)).to(tl.float16)
    return float16_codes.flat(float16_codes.times(low, power, R, B, 16), float16_codes.times(high, power, R, B, 16), R, B)


@gluon.jit
def ring_factors(FORMAT: gl.constexpr, s, t, down):
    """2^(e - 127) times 2^14: the exponent's bits are those of a float32."""
    a = fragment_codes.twice((((s.to(gl.int32) & 255) + 14) << 23).to(gl.float32, bitcast=True) * down)
    return a, a, a, a


@gluon.jit
def ring_eight(FORMAT: gl.constexpr, q, r, a, b, c, d, u, v, word):
    return ring_codes.e2m1(q, a)


def ring_shift(scale: torch.Tensor, top: torch.Tensor) -> int:
    return max(0, int(scale.max()) - 128)


MXFP4 = BlockFormat(
    GGMLType.MXFP4, split, decode, NIBBLES, scale=Plane(torch.uint8, 1), dots=Dots(load_4, products),
    float16=Float16(decode16), ring=Ring(ring_factors, ring_eight, ring_shift),
)  # fmt: skip
