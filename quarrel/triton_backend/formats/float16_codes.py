"""Codes to float16 in few instructions: what the formats' `Float16.decode` are made of.

A code is put under the exponent of 1024, where float16 steps by one, so that a subtraction leaves the integer exactly;
scale and minimum follow in one packed multiply-add, rounded once, from scales that are rounded to float16 themselves. PTX,
two values an instruction. Nothing is masked: rows are clamped by the caller, and columns come in whole blocks. Everything
is read as rows of bytes or words, of which neighbouring threads have neighbours, and nothing twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Four bytes of two codes: pairs of the low nibbles in $0 and $1, of the high ones in $2 and $3. `a` and `b` hold a byte in
# each half, under the exponent of 1024; a high nibble is there 16 times too large, which the multiply-add undoes.
_SPREAD = (
    "{ .reg .b32 a, b, c, k, l; prmt.b32 a, $4, 0x64646464, 0x4140; prmt.b32 b, $4, 0x64646464, 0x4342; mov.b32 k, %s; "
)
_PLAIN = (
    _SPREAD + "and.b32 c, a, 0x640F640F; sub.f16x2 $0, c, k; and.b32 c, b, 0x640F640F; sub.f16x2 $1, c, k; "
    "mov.b32 k, 0x2C002C00; mov.b32 l, %s; and.b32 c, a, 0x64F064F0; fma.rn.f16x2 $2, c, k, l; "
    "and.b32 c, b, 0x64F064F0; fma.rn.f16x2 $3, c, k, l; }"
)
_FOUR_LESS_8: tl.constexpr = tl.constexpr(_PLAIN % ("0x64086408", "0xD480D480"))

# With upper bits: $5 to $8 are words whose lowest bits belong to the low codes, $9 to $12 to the high ones. Which columns
# four neighbouring values of a tile are is the compiler's choice, so every value brings its own word.
_MORE = (
    _SPREAD + "and.b32 l, a, 0x640F640F; prmt.b32 c, $5, $6, 0x5410; and.b32 c, c, {mask}; mad.lo.u32 c, c, 16, l; "
    "sub.f16x2 $0, c, k; and.b32 l, b, 0x640F640F; prmt.b32 c, $7, $8, 0x5410; and.b32 c, c, {mask}; "
    "mad.lo.u32 c, c, 16, l; sub.f16x2 $1, c, k; shr.u32 a, a, 4; and.b32 l, a, 0x000F000F; or.b32 l, l, 0x64006400; "
    "prmt.b32 c, $9, $10, 0x5410; and.b32 c, c, {mask}; mad.lo.u32 c, c, 16, l; sub.f16x2 $2, c, k; shr.u32 b, b, 4; "
    "and.b32 l, b, 0x000F000F; or.b32 l, l, 0x64006400; prmt.b32 c, $11, $12, 0x5410; and.b32 c, c, {mask}; "
    "mad.lo.u32 c, c, 16, l; sub.f16x2 $3, c, k; }}"
)


def _more(mask: str, less: str) -> str:
    """PTX for codes of 4 bits and those in `mask` above them, `less` taken off."""
    return _MORE.replace("%s", less).replace("{ .reg", "{{ .reg").format(mask=mask)


_FIVE_LESS_16: tl.constexpr = tl.constexpr(_more("0x00010001", "0x64106410"))
_SIX_LESS_32: tl.constexpr = tl.constexpr(_more("0x00030003", "0x64206420"))
_MORE_OPERANDS: tl.constexpr = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r,r,r,r")

# Signed bytes, as unsigned ones less 128.
_EIGHT: tl.constexpr = tl.constexpr(
    "{ .reg .b32 a, b, k; mov.b32 k, 0x64806480; xor.b32 b, $2, 0x80808080; prmt.b32 a, b, 0x64646464, 0x4140; "
    "sub.f16x2 $0, a, k; prmt.b32 a, b, 0x64646464, 0x4342; sub.f16x2 $1, a, k; }"
)
# e2m1 has float16's fields under another bias: 2^14 too small, which is exact.
_E2M1: tl.constexpr = tl.constexpr(
    "{ .reg .b32 a, b, c, d, k; mov.b32 k, 0x74007400; prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342; "
    "shl.b32 c, a, 12; and.b32 c, c, 0x80008000; shl.b32 d, a, 9; and.b32 d, d, 0x0E000E00; or.b32 c, c, d; "
    "mul.rn.f16x2 $0, c, k; "
    "shl.b32 c, b, 12; and.b32 c, c, 0x80008000; shl.b32 d, b, 9; and.b32 d, d, 0x0E000E00; or.b32 c, c, d; "
    "mul.rn.f16x2 $1, c, k; "
    "shl.b32 c, a, 8; and.b32 c, c, 0x80008000; shl.b32 d, a, 5; and.b32 d, d, 0x0E000E00; or.b32 c, c, d; "
    "mul.rn.f16x2 $2, c, k; "
    "shl.b32 c, b, 8; and.b32 c, c, 0x80008000; shl.b32 d, b, 5; and.b32 d, d, 0x0E000E00; or.b32 c, c, d; "
    "mul.rn.f16x2 $3, c, k; }"
)


@triton.jit
def load_codes(codes, row, first, K, R: tl.constexpr, B: tl.constexpr):
    """Bytes of nibbles of B blocks, [R, B, 16]."""
    i = tl.arange(0, B * 16)[None, :]
    return tl.load(codes + row[:, None] * (K // 2) + (first * 16 + i))


@triton.jit
def blocks_at(row, first, K, B: tl.constexpr):
    """Where planes with an entry a block have theirs, [R, B]."""
    return row[:, None] * (K // 32) + (first + tl.arange(0, B))[None, :]


@triton.jit
def tops_at(row, first, K, B: tl.constexpr):
    """Where planes with an entry for 256 columns have theirs, [R, (B + 7) // 8]."""
    TOPS: tl.constexpr = (B + 7) // 8
    return row[:, None] * (K // 256) + (first // 8 + tl.arange(0, TOPS))[None, :]


@triton.jit
def spread_tops(t, R: tl.constexpr, B: tl.constexpr):
    """An entry a super-block to one a block, [R, B]."""
    EACH: tl.constexpr = B // t.shape[1]
    return tl.reshape(tl.broadcast_to(t[:, :, None], [R, t.shape[1], EACH]), [R, B])


@triton.jit
def pair(word):
    """Two float16 values of a word."""
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    return low, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def four_bits(q, R: tl.constexpr, B: tl.constexpr):
    """Codes less 8: of the low and of the high nibbles, [R, B, 16]."""
    q = tl.reshape(q, [R, B, 16])
    return tl.inline_asm_elementwise(
        _FOUR_LESS_8, "=r,=r,=r,=r,r", [q], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


@triton.jit
def five_bits(q, word, R: tl.constexpr, B: tl.constexpr):
    """Codes less 16; bit j of `word` [R, B] belongs to column j."""
    q = tl.reshape(q, [R, B, 16])
    j = tl.arange(0, 16)[None, None, :]
    word = word[:, :, None]
    return tl.inline_asm_elementwise(
        _FIVE_LESS_16, _MORE_OPERANDS, [q, word >> j, word >> (j + 16)], dtype=(tl.float16, tl.float16),
        is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def six_bits(q, words, R: tl.constexpr, B: tl.constexpr):
    """Codes less 32; `words` [R, 2 B] are two a block, with two bits a column."""
    q = tl.reshape(q, [R, B, 16])
    j = tl.arange(0, 16)[None, None, :]
    low, high = tl.split(tl.reshape(words, [R, B, 2]))
    return tl.inline_asm_elementwise(
        _SIX_LESS_32, _MORE_OPERANDS, [q, low[:, :, None] >> (j * 2), high[:, :, None] >> (j * 2)],
        dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def signed_bytes(q):
    return tl.inline_asm_elementwise(_EIGHT, "=r,=r,r", [q], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def e2m1(q, R: tl.constexpr, B: tl.constexpr):
    """Values of the low and of the high nibbles, [R, B, 16]."""
    q = tl.reshape(q, [R, B, 16])
    return tl.inline_asm_elementwise(_E2M1, "=r,=r,=r,=r,r", [q], dtype=(tl.float16, tl.float16), is_pure=True, pack=4)


@triton.jit
def times(q, s, R: tl.constexpr, B: tl.constexpr, L: tl.constexpr):
    """q [R, B, L] times s [R, B], rounded once."""
    s = tl.broadcast_to(s[:, :, None], [R, B, L])
    return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [q, s], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def times_plus(q, s, m, R: tl.constexpr, B: tl.constexpr):
    """q [R, B, 16] times s plus m, both [R, B], rounded once."""
    s, m = tl.broadcast_to(s[:, :, None], [R, B, 16]), tl.broadcast_to(m[:, :, None], [R, B, 16])
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [q, s, m], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def flat(low, high, R: tl.constexpr, B: tl.constexpr):
    """Both as `[R, B * 16]`."""
    return tl.reshape(low, [R, B * 16]), tl.reshape(high, [R, B * 16])
