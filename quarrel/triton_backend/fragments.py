"""Packed weights straight into the registers that `mma` reads: decoded in place, never through shared memory.

A thread of a warp holds rows r and r + 8 of blocks b and b + 4, sixteen columns at a time, and so do the operands of
`mma`, once their columns are counted in the same order for weights and activations. One word of codes (eight weights, or
four of Q8_0) becomes pairs of float16 in PTX; the values are those of `half.py`. Gluon, as the layouts are its point.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

STEP = 256
"""Columns that a warp takes at a time."""
GROUP = 8
"""Rows of x to a product."""
TAKEN = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0")

# Bytes of codes under the exponent of 1024, where float16 steps by one: pairs of low nibbles in $0 to $3 (the first
# column in $0), of high ones in $4 to $7. $9 and $10 are scale and what is added, both twice in a word.
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
EIGHT_OUT = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r")
EIGHT_OUT_5 = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r")
HALVES = gl.constexpr((gl.float16,) * 8)


@triton.jit(do_not_specialize=["tokens"])
def arrange(to, x, tokens, K: tl.constexpr, PDL: tl.constexpr):
    """Rows of x as float16 in the order in which the threads of a warp read them, 16 bytes each, side by side.

    `[groups, K / 256, 2 halves of a block, 2, 2, 8 rows, 4 blocks, 8 columns]`; rows beyond the last are zero. A warp that
    read x as it lies would touch 16 lines for what is now 4. Grid (K / 256, groups).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.arange(0, 2048)
    row = tl.program_id(1) * 8 + i // 32 % 8
    v = tl.load(x + row.to(tl.int64) * K + tl.program_id(0) * 256 + column_at(i), mask=row < tokens, other=0.0)
    tl.store(to + (tl.program_id(1).to(tl.int64) * (K // 256) + tl.program_id(0)) * 2048 + i, v.to(tl.float16))


@triton.jit
def place_of(row, column, K: tl.constexpr):
    """Where `arrange` puts a value."""
    block = column // 32 % 8
    group = row // 8 * (K // 256) + column // 256
    lane = row % 8 * 32 + block % 4 * 8 + column % 8
    return group * 2048 + column // 16 % 2 * 1024 + block // 4 * 512 + column // 8 % 2 * 256 + lane


@triton.jit
def column_at(i):
    """The column, of 256, of place i among 8 rows."""
    block = i // 8 % 4 + i // 512 % 2 * 4
    return block * 32 + i // 1024 * 16 + i // 256 % 2 * 8 + i % 8


@gluon.constexpr_function
def words_layout(turns, tall, rows):
    """`[turns, rows, 8, 4]` words: lanes of four blocks by eight rows, `tall` warps of rows, `turns` warps of columns."""
    regs = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 8, 0, 0], [0, 0, 4, 0]]
    regs += [[0, 16 * tall << i, 0, 0] for i in range((rows // 16 // tall).bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    warps = [[0, 16 << i, 0, 0] for i in range(tall.bit_length() - 1)]
    warps += [[1 << i, 0, 0, 0] for i in range(turns.bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [turns, rows, 8, 4])


@gluon.jit
def twice(v):
    """float32 as float16, in both halves of a word."""
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [v], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def float16_of(word):
    return word.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def fetch_words(FORMAT: gl.constexpr, codes, bits, scale, top, row, block, super, K: gl.constexpr, L4: gl.constexpr):
    """What `pairs` needs of blocks `block` [W, 1, 8] and super-blocks `super` [W, 1] of rows `row` [1, R] (int64)."""
    at = (row * (K // 32))[:, :, None] + block
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4))))[None, None, None, :]
    p = codes.to(gl.pointer_type(gl.int32))
    if FORMAT == "Q8_0":
        p = p + at[:, :, :, None] * 8 + word
        q, a = gl.load(p), gl.load(p + 4)
        s = gl.load(scale + at)
        t = s
        b = a
    else:
        q = gl.load(p + at[:, :, :, None] * 4 + word)
        a, b = q, q
        if FORMAT == "Q4_0":
            s = gl.load(scale + at)
            t = s
        else:
            s = gl.load(scale.to(gl.pointer_type(gl.int16)) + at)
            if FORMAT == "Q6_K":
                a = gl.load(bits + at * 2)
                b = gl.load(bits + at * 2 + 1)
                t = gl.load(top.to(gl.pointer_type(gl.int16)) + row * (K // 256) + super)
            else:
                t = gl.load(top.to(gl.pointer_type(gl.int32)) + row * (K // 256) + super)
                if FORMAT == "Q5_K":
                    a = gl.load(bits + at)
    return q, a, b, s, t


@gluon.jit
def pairs(FORMAT: gl.constexpr, q, a, b, s, t, W: gl.constexpr, R: gl.constexpr, L4: gl.constexpr, A: gl.constexpr):
    """Low and high columns of 8 blocks, `[W, R, 128]` float16 each, as `mma` reads them."""
    if FORMAT == "Q8_0":
        d = twice(s.to(gl.float32))[:, :, :, None].broadcast_to([W, R, 8, 4])
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            EIGHT, EIGHT_OUT, [q, a, d], dtype=HALVES, is_pure=True, pack=1
        )
    elif FORMAT == "Q4_0":
        d = twice(s.to(gl.float32))[:, :, :, None].broadcast_to([W, R, 8, 4])
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            FOUR, EIGHT_OUT, [q, d, d * 0], dtype=HALVES, is_pure=True, pack=1
        )
    else:
        both = s.to(gl.int32)
        d = float16_of(t)[:, :, None]
        shift = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4))))[None, None, None, :]
        if FORMAT == "Q6_K":
            s_low = twice(((both << 24) >> 24).to(gl.float32) * d)[:, :, :, None].broadcast_to([W, R, 8, 4])
            s_high = twice((both >> 8).to(gl.float32) * d)[:, :, :, None].broadcast_to([W, R, 8, 4])
            u_low = (a[:, :, :, None] >> (shift * 8)) & 255
            u_high = (b[:, :, :, None] >> (shift * 8)) & 255
            o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
                SIX, EIGHT_OUT_5, [q, s_low, s_high, u_low, u_high], dtype=HALVES, is_pure=True, pack=1
            )
        else:
            MIDDLE: gl.constexpr = 8.0 if FORMAT == "Q4_K" else 16.0
            step = (both & 255).to(gl.float32) * d
            m = MIDDLE * step - ((both >> 8) & 255).to(gl.float32) * float16_of(t >> 16)[:, :, None]
            d = twice(step)[:, :, :, None].broadcast_to([W, R, 8, 4])
            m = twice(m)[:, :, :, None].broadcast_to([W, R, 8, 4])
            if FORMAT == "Q4_K":
                o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
                    FOUR, EIGHT_OUT, [q, d, m], dtype=HALVES, is_pure=True, pack=1
                )
            else:
                u_low = (a[:, :, :, None] >> (shift * 4)) & 15
                u_high = (a[:, :, :, None] >> (shift * 4 + 16)) & 15
                o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
                    FIVE, EIGHT_OUT_5, [q, d, m, u_low, u_high], dtype=HALVES, is_pure=True, pack=1
                )
    low = gl.join(gl.join(o0, o2), gl.join(o1, o3))  # [W, R, 8, 4, 2, 2]
    high = gl.join(gl.join(o4, o6), gl.join(o5, o7))
    low = gl.convert_layout(gl.reshape(low, [W, R, 128]), A, assert_trivial=True)
    high = gl.convert_layout(gl.reshape(high, [W, R, 128]), A, assert_trivial=True)
    return low, high
