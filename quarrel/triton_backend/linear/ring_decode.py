"""Tiles of packed weights in shared memory, decoded into the registers that `wgmma` reads as its left operand.

A tile has 16 T rows of 256 columns; a lane of T warps has rows g and g + 8 of blocks t and t + 4, of 32 columns each. A
word of codes makes four pairs of float16. A nibble below bit 10 of a float16 is a subnormal number and exact: q * 2^-24
in bits 0 to 3, q * 2^-20 in bits 4 to 7. So one mask and one packed multiply-add make two weights, rounded once: with the
scale times 2^24 or 2^20, and the minimum added. Where such scales would overflow, they are divided by a power of two of
the whole matrix (`experts/ring.py: shift_of`), and its sums multiplied. Columns of x come in the order of the pairs
(`column_at` there).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FORMATS = ("Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""What `decode` reads."""

_HALVES = gl.constexpr((gl.float16,) * 8)
_EIGHT_OUT = "=h,=h,=h,=h,=h,=h,=h,=h"


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
_FOUR_OPERANDS = gl.constexpr(_EIGHT_OUT + ",r,r,r,r")
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
_SIX_OPERANDS = gl.constexpr(_EIGHT_OUT + ",r,r,r,r,r,r,r")
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
# $8 codes, $9 scale times 2^6. e2m1 in a byte as s00eem00 is E4M3, 2^-6 too small; the device makes float16 of those.
_E2M1 = gl.constexpr(
    "{ .reg .b32 a, b, v; .reg .b16 l, h; prmt.b32 v, $8, $8, 0x3120; "
    "shl.b32 a, v, 4; shl.b32 b, v, 2; and.b32 a, a, 0x80808080; and.b32 b, b, 0x1C1C1C1C; or.b32 a, a, b; "
    "mov.b32 {l, h}, a; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h; "
    "mul.rn.f16x2 a, a, $9; mul.rn.f16x2 b, b, $9; mov.b32 {$0, $1}, a; mov.b32 {$4, $5}, b; "
    "and.b32 a, v, 0x80808080; shr.u32 b, v, 2; and.b32 b, b, 0x1C1C1C1C; or.b32 a, a, b; "
    "mov.b32 {l, h}, a; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h; "
    "mul.rn.f16x2 a, a, $9; mul.rn.f16x2 b, b, $9; mov.b32 {$2, $3}, a; mov.b32 {$6, $7}, b; }"
)
_E2M1_OPERANDS = gl.constexpr(_EIGHT_OUT + ",r,r")

# $3 scale and minimum (bytes), $4 d * 2^24 and -dmin * 2^8 (float16): scale * 2^24, scale * 2^20, -minimum, twice each.
_SCALES_4 = gl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $3, 0x64646464, 0x4140; mov.b32 b, 0x64006400; "
    "sub.f16x2 a, a, b; mul.rn.f16x2 a, a, $4; prmt.b32 $0, a, a, 0x1010; prmt.b32 b, a, a, 0x3232; "
    "mov.b32 a, 0x1C001C00; mul.rn.f16x2 $2, b, a; mov.b32 a, 0x2C002C00; mul.rn.f16x2 $1, $0, a; }"
)
# $4 scales of low and of high columns (signed bytes), $5 d * 2^24 twice: the first * 2^24, the second * 2^20, -32 each.
_SCALES_6 = gl.constexpr(
    "{ .reg .b32 a, b; xor.b32 a, $4, 0x8080; prmt.b32 a, a, 0x64646464, 0x4140; mov.b32 b, 0x64806480; "
    "sub.f16x2 a, a, b; mul.rn.f16x2 a, a, $5; prmt.b32 $0, a, a, 0x1010; prmt.b32 $1, a, a, 0x3232; "
    "mov.b32 a, 0x80208020; mul.rn.f16x2 $2, $0, a; mul.rn.f16x2 $3, $1, a; "
    "mov.b32 a, 0x2C002C00; mul.rn.f16x2 $1, $1, a; }"
)


@gluon.constexpr_function
def _codes_layout(T, GATED):
    """Words `[16 T, 32]`, 128 bytes a row. Lanes 2 to 4 take rows 4, 1 and 2, so that eight lanes meet no bank twice."""
    other = [8 * T, 0] if GATED else [8, 0]
    first = 8 if GATED else 16
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], other, [0, 16]],
        [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]],
        [[first << i, 0] for i in range(T.bit_length() - 1)],
        [],
        [16 * T, 32],
    )


@gluon.constexpr_function
def _bytes_layout(T, GATED):
    """Words `[16 T, 32]` of codes of 8 bits: a lane has both 16 bytes of block t."""
    other = [8 * T, 0] if GATED else [8, 0]
    first = 8 if GATED else 16
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], other],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[first << i, 0] for i in range(T.bit_length() - 1)],
        [],
        [16 * T, 32],
    )


@gluon.constexpr_function
def _entries_layout(T, GATED, PLANES, EACH):
    """`[16 T, 8 EACH]`: of each row of a lane, EACH entries of blocks t and t + 4."""
    other = [8 * T, 0] if GATED else [8, 0]
    first = 8 if GATED else 16
    rows = [[1, 0], [2, 0], [4, 0]] if PLANES == 2 else [[4, 0], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(
        ([[0, 1]] if EACH == 2 else []) + [other, [0, 4 * EACH]],
        [[0, EACH], [0, 2 * EACH], *rows],
        [[first << i, 0] for i in range(T.bit_length() - 1)],
        [],
        [16 * T, 8 * EACH],
    )


@gluon.constexpr_function
def words_layout(T):
    """`[16 T, 4, 2]`: two words of block t of rows g and g + 8."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16 << i, 0, 0] for i in range(T.bit_length() - 1)],
        [],
        [16 * T, 4, 2],
    )


@gluon.jit
def row_of(m, GATED: gl.constexpr, T: gl.constexpr, PLANES: gl.constexpr):
    """Which row of the tile is row m of the product. GATED: half a tile of gate, then half a tile of up."""
    g = m & 7
    if PLANES == 1:
        g = ((g & 1) << 2) | (g >> 1)
    if GATED:
        return (m >> 4) * 8 + g + ((m >> 3) & 1) * (8 * T)
    else:
        return (m & ~7) + g


@gluon.jit
def in_product_order(v, T: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr, A: gl.constexpr, B: gl.constexpr):
    """Rows of a tile `[16 T, A, B]` in the order of the product's."""
    if PLANES == 2:
        if GATED:
            v = gl.permute(gl.reshape(v, [2, T, 8, A, B]), (1, 0, 2, 3, 4))
    else:
        if GATED:
            v = gl.permute(gl.reshape(v, [2, T, 2, 4, A, B]), (1, 0, 3, 2, 4, 5))
        else:
            v = gl.permute(gl.reshape(v, [2 * T, 2, 4, A, B]), (0, 2, 1, 3, 4))
    return gl.reshape(v, [16 * T, A, B])


@gluon.jit
def _quarters(v, T: gl.constexpr):
    """`[16 T, 4, 2, 2, 2]` to four `[16 T, 4, 2]`: of the last two axes, the last one slowest."""
    L: gl.constexpr = words_layout(T)
    a, b = gl.split(v)
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    return (
        gl.convert_layout(a0, L, assert_trivial=True),
        gl.convert_layout(a1, L, assert_trivial=True),
        gl.convert_layout(b0, L, assert_trivial=True),
        gl.convert_layout(b1, L, assert_trivial=True),
    )


@gluon.jit
def nibbles(tile, T: gl.constexpr, GATED: gl.constexpr):
    """Codes of 4 bits of 256 columns: words 0 1 and 2 3 of block t, then of block t + 4."""
    v = in_product_order(gl.reshape(tile.load(_codes_layout(T, GATED)), [16 * T, 32, 1]), T, GATED, 1, 32, 1)
    v = gl.permute(gl.reshape(v, [16 * T, 2, 4, 2, 2]), (0, 2, 4, 3, 1))  # row, half, t, pair, word
    return _quarters(v, T)


@gluon.jit
def signed_bytes(tile, T: gl.constexpr, GATED: gl.constexpr):
    """Codes of 8 bits of 128 columns: words 0 1, 2 3, 4 5 and 6 7 of block t."""
    v = in_product_order(gl.reshape(tile.load(_bytes_layout(T, GATED)), [16 * T, 32, 1]), T, GATED, 2, 32, 1)
    v = gl.permute(gl.reshape(v, [16 * T, 4, 2, 2, 2]), (0, 1, 4, 3, 2))  # row, t, half, pair, word
    return _quarters(v, T)


@gluon.jit
def entries(tile, T: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr):
    """One entry a block `[16 T, 8]`: of blocks t, and of blocks t + 4."""
    F: gl.constexpr = gl.SliceLayout(2, words_layout(T))
    v = gl.reshape(tile.load(_entries_layout(T, GATED, PLANES, 1)), [16 * T, 8, 1])
    v = gl.reshape(in_product_order(v, T, GATED, PLANES, 8, 1), [16 * T, 2, 4])
    a, b = gl.split(gl.permute(v, (0, 2, 1)))
    return gl.convert_layout(a, F, assert_trivial=True), gl.convert_layout(b, F, assert_trivial=True)


@gluon.jit
def double_entries(tile, T: gl.constexpr, GATED: gl.constexpr, PLANES: gl.constexpr):
    """Two entries a block `[16 T, 16]`: both of blocks t, then both of blocks t + 4."""
    F: gl.constexpr = gl.SliceLayout(2, words_layout(T))
    v = gl.reshape(tile.load(_entries_layout(T, GATED, PLANES, 2)), [16 * T, 8, 2])
    v = gl.reshape(in_product_order(v, T, GATED, PLANES, 8, 2), [16 * T, 2, 4, 2])
    a, b = gl.split(gl.permute(v, (0, 2, 3, 1)))
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    return (
        gl.convert_layout(a0, F, assert_trivial=True),
        gl.convert_layout(a1, F, assert_trivial=True),
        gl.convert_layout(b0, F, assert_trivial=True),
        gl.convert_layout(b1, F, assert_trivial=True),
    )


@gluon.jit
def load_scales(FORMAT: gl.constexpr, p_scale, row, ok, step, K: gl.constexpr, T: gl.constexpr):
    """Scales of blocks t and t + 4 from memory, where a row of them is no whole number of 16 bytes. `row` [16 T]."""
    F: gl.constexpr = gl.SliceLayout(2, words_layout(T))
    block = step * 8 + gl.arange(0, 4, gl.SliceLayout(0, F))[None, :]
    at = row[:, None] * (K // 32) + block
    if FORMAT != "MXFP4":
        p_scale = p_scale.to(gl.pointer_type(gl.int16))
    s0 = gl.load(p_scale + at, mask=ok[:, None] & (block < K // 32), other=0).to(gl.int16)
    s1 = gl.load(p_scale + at + 4, mask=ok[:, None] & (block + 4 < K // 32), other=0).to(gl.int16)
    return s0, s1


@gluon.jit
def load_top(FORMAT: gl.constexpr, p_top, row, ok, step, K: gl.constexpr):
    """The super-block's scales of 256 columns, `[16 T]`; nothing where a format has none."""
    if FORMAT == "Q4_K" or FORMAT == "Q5_K":
        t = gl.load(p_top.to(gl.pointer_type(gl.int32)) + row * (K // 256) + step, mask=ok, other=0)
    elif FORMAT == "Q6_K":
        t = gl.load(p_top.to(gl.pointer_type(gl.int16)) + row * (K // 256) + step, mask=ok, other=0).to(gl.int32)
    else:
        t = ok.to(gl.int32)
    return t


@gluon.jit
def _twice(v):
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [v], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _packed(low, high):
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _float16_of(word):
    return word.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def factors(FORMAT: gl.constexpr, s, t, down, T: gl.constexpr):
    """What `decode` multiplies by and adds, of scales `s` [16 T, 4] and `t` [16 T]; `down` is 2^-shift. Four words."""
    if FORMAT == "Q4_K" or FORMAT == "Q5_K":
        top = _packed(_float16_of(t) * (16777216.0 * down), _float16_of(t >> 16) * (-256.0 * down))
        a, b, c = gl.inline_asm_elementwise(
            _SCALES_4, "=r,=r,=r,r,r", [s.to(gl.int32), top[:, None].broadcast_to([16 * T, 4])], dtype=(gl.int32,) * 3,
            is_pure=True, pack=1,
        )  # fmt: skip
        d = c
    elif FORMAT == "Q6_K":
        top = _twice(_float16_of(t) * (16777216.0 * down))
        a, b, c, d = gl.inline_asm_elementwise(
            _SCALES_6, "=r,=r,=r,=r,r,r", [s.to(gl.int32), top[:, None].broadcast_to([16 * T, 4])], dtype=(gl.int32,) * 4,
            is_pure=True, pack=1,
        )  # fmt: skip
    elif FORMAT == "MXFP4":
        # 2^(e - 127) times 2^6: the exponent's bits are those of a float32.
        a = _twice((((s.to(gl.int32) & 255) + 6) << 23).to(gl.float32, bitcast=True) * down)
        b, c, d = a, a, a
    else:
        f = _float16_of(s.to(gl.int32)) * down
        a = _twice(f * 16777216.0)
        b = _twice(f * 1048576.0)
        ZERO: gl.constexpr = 128.0 if FORMAT == "Q8_0" else (16.0 if FORMAT == "Q5_0" else 8.0)
        c = _twice(f * -ZERO)
        d = c
    return a, b, c, d


@gluon.jit
def _each(v, T: gl.constexpr):
    return v[:, :, None].broadcast_to([16 * T, 4, 2])


@gluon.jit
def decode(FORMAT: gl.constexpr, PAIR: gl.constexpr, q, r, a, b, c, d, u, v, T: gl.constexpr, MMA: gl.constexpr):
    """64 columns of a tile, `[16 T, 64]` float16 as `wgmma` reads them from registers.

    q: words 2 PAIR and 2 PAIR + 1 of the blocks; r: those of their high columns,
    where codes have 8 bits. a to d: `factors`.
    u, v: the blocks' upper bits, one word (u) or one for low and one for high columns.
    """
    L: gl.constexpr = words_layout(T)
    word = (PAIR * 2 + gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L))))[None, None, :]
    if FORMAT == "MXFP4":
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            _E2M1, _E2M1_OPERANDS, [q, _each(a, T)], dtype=_HALVES, is_pure=True, pack=1
        )
    elif FORMAT == "Q8_0":
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            _BYTES, _FOUR_OPERANDS, [q, r, _each(a, T), _each(c, T)], dtype=_HALVES, is_pure=True, pack=1
        )
    elif FORMAT == "Q4_0" or FORMAT == "Q4_K":
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            _FOUR, _FOUR_OPERANDS, [q, _each(a, T), _each(b, T), _each(c, T)], dtype=_HALVES, is_pure=True, pack=1
        )
    elif FORMAT == "Q6_K":
        low, high = (u[:, :, None] >> (word * 8)) & 255, (v[:, :, None] >> (word * 8)) & 255
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            _SIX, _SIX_OPERANDS, [q, _each(a, T), _each(b, T), _each(c, T), _each(d, T), low, high], dtype=_HALVES,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        gl.static_assert(FORMAT == "Q5_K" or FORMAT == "Q5_0", "not a format of the ring")
        low, high = (u[:, :, None] >> (word * 4)) & 15, (u[:, :, None] >> (word * 4 + 16)) & 15
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            _FIVE, _SIX_OPERANDS, [q, _each(a, T), _each(b, T), _each(c, T), _each(d, T), low, high], dtype=_HALVES,
            is_pure=True, pack=1,
        )  # fmt: skip
    low = gl.join(gl.join(o0, o1), gl.join(o2, o3))  # [row, t, word, one, upper]
    high = gl.join(gl.join(o4, o5), gl.join(o6, o7))
    both = gl.permute(gl.join(low, high), (0, 2, 5, 4, 1, 3))  # [row, word, next, upper, t, one]
    return gl.convert_layout(gl.reshape(both, [16 * T, 64]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
