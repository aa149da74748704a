"""One word of codes to eight float16 weights in registers, for tiles in shared memory: what the formats' `Ring` is made of.

A nibble below bit 10 of a float16 is a subnormal number and exact: q * 2^-24 in bits 0 to 3, q * 2^-20 in bits 4 to 7. So
one mask and one packed multiply-add make two weights, rounded once: with the scale times 2^24 or 2^20, and the minimum
added. Where such scales would overflow, they are divided by a power of two of the whole matrix (`shift_for`), and its sums
multiplied. A pair is columns j and j + 1 of the low or high half of a block.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quarrel.triton_backend.formats.fragment_codes import beside, float16_of, twice

_EIGHT_OUT = gl.constexpr((gl.float16,) * 8)
_OUTPUTS = "=h,=h,=h,=h,=h,=h,=h,=h"


def _pair(out: int, word: str, mask: str, scale: str, plus: str) -> str:
    return f"and.b32 c, {word}, {mask}; fma.rn.f16x2 c, c, {scale}, {plus}; mov.b32 {{${out}, ${out + 1}}}, c; "


def _with_upper(out: int, word: str, mask: str, bits: str, spread: int, upper: str, scale: str, plus: str) -> str:
    """A pair of nibbles with their upper bits, which a multiplication spreads to where they belong."""
    return (
        f"mul.lo.u32 u, {bits}, {spread}; and.b32 u, u, {upper}; and.b32 c, {word}, {mask}; or.b32 c, c, u; "
        f"fma.rn.f16x2 c, c, {scale}, {plus}; mov.b32 {{${out}, ${out + 1}}}, c; "
    )


# $8 codes; $9 and $10 the scale times 2^24 and 2^20, $11 what is added: each twice in a word.
_FOUR = gl.constexpr(
    "{ .reg .b32 c, v; "
    + _pair(0, "$8", "0x000F000F", "$9", "$11")
    + _pair(2, "$8", "0x00F000F0", "$10", "$11")
    + "shr.u32 v, $8, 8; "
    + _pair(4, "v", "0x000F000F", "$9", "$11")
    + _pair(6, "v", "0x00F000F0", "$10", "$11")
    + "}"
)
_FOUR_OPERANDS = gl.constexpr(_OUTPUTS + ",r,r,r,r")
# $8 codes; $9 scale of the low columns (2^24), $10 of the high ones (2^20), $11 and $12 what is added to each; $13 and $14
# the upper bits of four low and of four high columns.
_FIVE = gl.constexpr(
    "{ .reg .b32 c, u, v; "
    + _with_upper(0, "$8", "0x000F000F", "$13", 1 << 4 | 1 << 18, "0x00100010", "$9", "$11")
    + _with_upper(2, "$8", "0x00F000F0", "$14", 1 << 8 | 1 << 22, "0x01000100", "$10", "$12")
    + "shr.u32 v, $8, 8; "
    + _with_upper(4, "v", "0x000F000F", "$13", 1 << 3 | 1 << 17, "0x00100010", "$9", "$11")
    + _with_upper(6, "v", "0x00F000F0", "$14", 1 << 7 | 1 << 21, "0x01000100", "$10", "$12")
    + "}"
)
_SIX = gl.constexpr(
    "{ .reg .b32 c, u, v; "
    + _with_upper(0, "$8", "0x000F000F", "$13", 1 << 4 | 1 << 16, "0x00300030", "$9", "$11")
    + _with_upper(2, "$8", "0x00F000F0", "$14", 1 << 8 | 1 << 20, "0x03000300", "$10", "$12")
    + "shr.u32 v, $8, 8; "
    + _with_upper(4, "v", "0x000F000F", "$13", 1 << 2 | 1 << 14, "0x00300030", "$9", "$11")
    + _with_upper(6, "v", "0x00F000F0", "$14", 1 << 6 | 1 << 18, "0x03000300", "$10", "$12")
    + "}"
)
_SIX_OPERANDS = gl.constexpr(_OUTPUTS + ",r,r,r,r,r,r,r")
# $8 and $9 words of signed bytes, of columns 4 i on and 16 + 4 i on; $10 scale times 2^24, $11 -128 times the scale.
_BYTES = gl.constexpr(
    "{ .reg .b32 c, v, w; xor.b32 v, $8, 0x80808080; xor.b32 w, $9, 0x80808080; "
    + _pair(0, "v", "0x00FF00FF", "$10", "$11")
    + _pair(2, "w", "0x00FF00FF", "$10", "$11")
    + "shr.u32 v, v, 8; shr.u32 w, w, 8; "
    + _pair(4, "v", "0x00FF00FF", "$10", "$11")
    + _pair(6, "w", "0x00FF00FF", "$10", "$11")
    + "}"
)
# $8 codes, $9 scale times 2^14. Sign and magnitude of e2m1 in a byte as s000eem0 are the upper byte of a float16, 2^-14 too
# small, which is exact.
_E2M1 = gl.constexpr(
    "{ .reg .b32 a, b, c; shl.b32 a, $8, 4; shl.b32 b, $8, 1; and.b32 a, a, 0x80808080; and.b32 b, b, 0x0E0E0E0E; "
    "or.b32 a, a, b; prmt.b32 b, a, 0, 0x2404; and.b32 a, a, 0xFF00FF00; "
    "mul.rn.f16x2 b, b, $9; mul.rn.f16x2 a, a, $9; mov.b32 {$0, $1}, b; mov.b32 {$4, $5}, a; "
    "and.b32 a, $8, 0x80808080; shr.u32 b, $8, 3; and.b32 b, b, 0x0E0E0E0E; or.b32 a, a, b; "
    "prmt.b32 b, a, 0, 0x2404; and.b32 a, a, 0xFF00FF00; "
    "mul.rn.f16x2 b, b, $9; mul.rn.f16x2 a, a, $9; mov.b32 {$2, $3}, b; mov.b32 {$6, $7}, a; }"
)
_E2M1_OPERANDS = gl.constexpr(_OUTPUTS + ",r,r")


def shift_for(most: torch.Tensor) -> int:
    """The power of two that the scales of a matrix are divided by, of the largest scales of its blocks, so that they fit
    float16 when multiplied by 2^24."""
    largest = float(torch.where(most.isfinite(), most, 0.0).max())
    return max(0, math.ceil(math.log2(largest) + 24 - 15)) if largest > 0 else 0


def shift_of_scales(scale: torch.Tensor, top: torch.Tensor) -> int:
    """`Ring.shift` of a format with one scale a block."""
    return shift_for(scale.reshape(-1).float().abs())


@gluon.jit
def packed(low, high):
    """Two float32 as float16 in a word."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def centred(s, down, MIDDLE: gl.constexpr):
    """Factors of codes less MIDDLE, times a float16 scale."""
    f = float16_of(s.to(gl.int32)) * down
    a = twice(f * 16777216.0)
    b = twice(f * 1048576.0)
    c = twice(f * -MIDDLE)
    return a, b, c, c


@gluon.jit
def four(q, a, b, c):
    """Nibbles: low columns times a, high ones times b, c added."""
    return gl.inline_asm_elementwise(
        _FOUR, _FOUR_OPERANDS, [q, beside(a, q), beside(b, q), beside(c, q)], dtype=_EIGHT_OUT, is_pure=True, pack=1
    )


@gluon.jit
def five(q, a, b, c, d, low, high):
    """Nibbles with a fifth bit; c is added to low columns, d to high ones."""
    return gl.inline_asm_elementwise(
        _FIVE, _SIX_OPERANDS, [q, beside(a, q), beside(b, q), beside(c, q), beside(d, q), low, high], dtype=_EIGHT_OUT,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def six(q, a, b, c, d, low, high):
    """Nibbles with two bits above them."""
    return gl.inline_asm_elementwise(
        _SIX, _SIX_OPERANDS, [q, beside(a, q), beside(b, q), beside(c, q), beside(d, q), low, high], dtype=_EIGHT_OUT,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def signed_bytes(q, after, a, c):
    """Signed bytes of two words, 16 columns apart."""
    return gl.inline_asm_elementwise(
        _BYTES, _FOUR_OPERANDS, [q, after, beside(a, q), beside(c, q)], dtype=_EIGHT_OUT, is_pure=True, pack=1
    )


@gluon.jit
def e2m1(q, a):
    """Codes in E2M1, times a."""
    return gl.inline_asm_elementwise(_E2M1, _E2M1_OPERANDS, [q, beside(a, q)], dtype=_EIGHT_OUT, is_pure=True, pack=1)
