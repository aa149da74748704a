"""One word of codes to eight float16 weights in registers: what the formats' `Fragments.eight` are made of. Gluon.

Bytes of codes go under the exponent of 1024, where float16 steps by one; the values are those of `float16_codes.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Pairs of low nibbles in $0 to $3 (the first column in $0), of high ones in $4 to $7. $9 and $10 are scale and what is
# added, both twice in a word.
_HEAD = "{ .reg .b32 a, b, c, d, e, k, l; prmt.b32 a, $8, 0x64646464, 0x4140; prmt.b32 b, $8, 0x64646464, 0x4342; "
_OUT = "mov.b32 {$%d, $%d}, c; "
FOUR = gl.constexpr(
    _HEAD
    + "mov.b32 k, 0x64086408; and.b32 c, a, 0x640F640F; sub.f16x2 c, c, k; fma.rn.f16x2 c, c, $9, $10; "
    + _OUT % (0, 1)
    + "and.b32 c, b, 0x640F640F; sub.f16x2 c, c, k; fma.rn.f16x2 c, c, $9, $10; "
    + _OUT % (2, 3)
    + "mov.b32 k, 0x2C002C00; mov.b32 l, 0xD480D480; "
    + "and.b32 c, a, 0x64F064F0; fma.rn.f16x2 c, c, k, l; fma.rn.f16x2 c, c, $9, $10; "
    + _OUT % (4, 5)
    + "and.b32 c, b, 0x64F064F0; fma.rn.f16x2 c, c, k, l; fma.rn.f16x2 c, c, $9, $10; "
    + _OUT % (6, 7)
    + "}"
)


def _upper(code: str, bits: str, spread: int, mask: str, then: str, out: tuple[int, int]) -> str:
    """A pair: the low nibbles of `code`, with bits of `bits` above them."""
    return (
        f"and.b32 d, {code}, 0x000F000F; or.b32 d, d, 0x64006400; mul.lo.u32 e, {bits}, {spread}; and.b32 e, e, {mask}; "
        f"or.b32 c, d, e; sub.f16x2 c, c, k; {then} " + _OUT % out
    )


# $11 holds two bits for each of the four low codes, $12 for the high ones; $9 and $10 are the scales of the two.
SIX = gl.constexpr(
    _HEAD
    + "mov.b32 k, 0x64206420; "
    + _upper("a", "$11", 1 << 4 | 1 << 18, "0x00300030", "mul.rn.f16x2 c, c, $9;", (0, 1))
    + _upper("b", "$11", 1 | 1 << 14, "0x00300030", "mul.rn.f16x2 c, c, $9;", (2, 3))
    + "shr.u32 a, a, 4; shr.u32 b, b, 4; "
    + _upper("a", "$12", 1 << 4 | 1 << 18, "0x00300030", "mul.rn.f16x2 c, c, $10;", (4, 5))
    + _upper("b", "$12", 1 | 1 << 14, "0x00300030", "mul.rn.f16x2 c, c, $10;", (6, 7))
    + "}"
)
# One bit for each.
FIVE = gl.constexpr(
    _HEAD
    + "mov.b32 k, 0x64106410; "
    + _upper("a", "$11", 1 << 4 | 1 << 19, "0x00100010", "fma.rn.f16x2 c, c, $9, $10;", (0, 1))
    + _upper("b", "$11", 1 << 2 | 1 << 17, "0x00100010", "fma.rn.f16x2 c, c, $9, $10;", (2, 3))
    + "shr.u32 a, a, 4; shr.u32 b, b, 4; "
    + _upper("a", "$12", 1 << 4 | 1 << 19, "0x00100010", "fma.rn.f16x2 c, c, $9, $10;", (4, 5))
    + _upper("b", "$12", 1 << 2 | 1 << 17, "0x00100010", "fma.rn.f16x2 c, c, $9, $10;", (6, 7))
    + "}"
)
# Two words of signed bytes, $8 and $9, as unsigned ones less 128; $10 is the scale.
EIGHT = gl.constexpr(
    "{ .reg .b32 b, c, k; mov.b32 k, 0x64806480; "
    + "".join(
        f"xor.b32 b, ${8 + i}, 0x80808080; prmt.b32 c, b, 0x64646464, 0x4140; sub.f16x2 c, c, k; mul.rn.f16x2 c, c, $10; "
        + _OUT % (4 * i, 4 * i + 1)
        + "prmt.b32 c, b, 0x64646464, 0x4342; sub.f16x2 c, c, k; mul.rn.f16x2 c, c, $10; "
        + _OUT % (4 * i + 2, 4 * i + 3)
        for i in range(2)
    )
    + "}"
)
_OPERANDS_3 = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r")
_OPERANDS_5 = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r")
_EIGHT_OUT = gl.constexpr((gl.float16,) * 8)


@gluon.jit
def twice(v):
    """float32 as float16, in both halves of a word."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [v], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def float16_of(word):
    return word.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def beside(v, q):
    """An entry a block beside each of its words q."""
    return gl.expand_dims(v, len(q.shape) - 1).broadcast_to(q.shape)


@gluon.jit
def of_words(v, q, by):
    """The part of a block's entry that belongs to each of its words: shifted down by so many bits."""
    return gl.expand_dims(v, len(q.shape) - 1) >> by


@gluon.jit
def four(q, s, m):
    return gl.inline_asm_elementwise(FOUR, _OPERANDS_3, [q, s, m], dtype=_EIGHT_OUT, is_pure=True, pack=1)


@gluon.jit
def five(q, s, m, low, high):
    return gl.inline_asm_elementwise(FIVE, _OPERANDS_5, [q, s, m, low, high], dtype=_EIGHT_OUT, is_pure=True, pack=1)


@gluon.jit
def six(q, s_low, s_high, low, high):
    return gl.inline_asm_elementwise(
        SIX, _OPERANDS_5, [q, s_low, s_high, low, high], dtype=_EIGHT_OUT, is_pure=True, pack=1
    )


@gluon.jit
def eight(q, after, s):
    return gl.inline_asm_elementwise(EIGHT, _OPERANDS_3, [q, after, s], dtype=_EIGHT_OUT, is_pure=True, pack=1)
