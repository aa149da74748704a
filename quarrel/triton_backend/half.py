"""Values of packed weights as float16 in few instructions: what `formats.halves` gives, for tiles that matrix units read.

A code is put under the exponent of 1024, where float16 steps by one, so that a subtraction leaves the integer exactly;
scale and minimum follow in one packed multiply-add, rounded once, from scales that are rounded to float16 themselves. PTX,
two values an instruction; the interpreter has none, and there, as for the other formats, `halves` is rounded.
Nothing is masked: rows are clamped by the caller, and columns come in whole blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.formats import _wide, halves
from quarrel.triton_backend.runtime import INTERPRETED

_FAST = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")

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


def is_fast(format: str, compute: str, blocks: int) -> bool:
    """Whether there are instructions for this format, in steps of so many blocks."""
    return format in _FAST and compute == "float16" and not INTERPRETED and (format != "Q8_0" or blocks > 1)


@triton.jit
def tile_halves(
    FORMAT: tl.constexpr, FAST: tl.constexpr, COMPUTE: tl.constexpr, codes, bits, scale, top, row, first, K,
    R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Two tiles `[R, B * 16]` of the compute type: columns `low_columns` of the B blocks from `first` on, and the others.

    `row` [R] is int64.
    """
    if FAST:
        q, a, s, t = fetch(FORMAT, codes, bits, scale, top, row, first, K, R, B)
        low, high = unpack(FORMAT, q, a, s, t, R, B)
    else:
        block = first + tl.arange(0, B)
        if FORMAT == "F16" or FORMAT == "BF16" or FORMAT == "F32":
            low, high = _wide(FORMAT, codes, row, block, row >= 0, K)
        else:
            low, high = halves(FORMAT, codes, bits, scale, top, row, block, row >= 0, K)
        low, high = tl.reshape(low, [R, B * 16]).to(COMPUTE), tl.reshape(high, [R, B * 16]).to(COMPUTE)
    return low, high


@triton.jit
def low_columns(FORMAT: tl.constexpr, FAST: tl.constexpr, B: tl.constexpr):
    """The columns of the low tile, [B * 16]; those of the high one are `high_offset` further on."""
    part = tl.arange(0, B * 16)
    return part if FAST and FORMAT == "Q8_0" else part // 16 * 32 + part % 16


@triton.jit
def high_offset(FORMAT: tl.constexpr, FAST: tl.constexpr, B: tl.constexpr):
    return B * 16 if FAST and FORMAT == "Q8_0" else 16


@triton.jit
def fetch(FORMAT: tl.constexpr, codes, bits, scale, top, row, first, K, R: tl.constexpr, B: tl.constexpr):
    """What `unpack` needs of B blocks, as it lies in memory: four tensors, some of them the same.

    Everything is read as rows of bytes or words, of which neighbouring threads have neighbours, and nothing twice.
    """
    at = row[:, None] * (K // 32) + (first + tl.arange(0, B))[None, :]  # [R, B]
    bytes16 = tl.arange(0, B * 16)[None, :]
    if FORMAT == "Q8_0":
        p = codes + row[:, None] * K + (first * 32 + bytes16)
        q, a = tl.load(p), tl.load(p + B * 16)
        half = row[:, None] * (K // 32) + (first + tl.arange(0, B // 2))[None, :]
        s, t = tl.load(scale + half), tl.load(scale + half + B // 2)
    else:
        q = tl.load(codes + row[:, None] * (K // 2) + (first * 16 + bytes16))
        a = q
        if FORMAT == "MXFP4" or FORMAT == "Q4_0" or FORMAT == "Q5_0":
            s = tl.load(scale + at)
            t = s
        elif FORMAT == "Q4_1" or FORMAT == "Q5_1":
            s = tl.load(scale.to(tl.pointer_type(tl.int32)) + at)
            t = s
        else:
            s = tl.load(scale.to(tl.pointer_type(tl.int16)) + at)
            TOPS: tl.constexpr = (B + 7) // 8
            of = row[:, None] * (K // 256) + (first // 8 + tl.arange(0, TOPS))[None, :]  # [R, TOPS]
            p_top = top.to(tl.pointer_type(tl.int32))
            if FORMAT == "Q6_K":
                # Two of these to a word: a load of two bytes would not be in the pipeline.
                t = tl.load(p_top + of // 2) >> (of % 2 * 16).to(tl.int32)
                a = tl.load(bits + row[:, None] * (K // 16) + (first * 2 + tl.arange(0, B * 2))[None, :])
            else:
                tl.static_assert(FORMAT == "Q4_K" or FORMAT == "Q5_K", "no fast way")
                t = tl.load(p_top + of)
        if FORMAT == "Q5_0" or FORMAT == "Q5_1" or FORMAT == "Q5_K":
            a = tl.load(bits + at)
    return q, a, s, t


@triton.jit
def _spread(t, R: tl.constexpr, B: tl.constexpr):
    """An entry a super-block, [R, (B + 7) // 8], to one a block."""
    EACH: tl.constexpr = B // t.shape[1]
    return tl.reshape(tl.broadcast_to(t[:, :, None], [R, t.shape[1], EACH]), [R, B])


@triton.jit
def unpack(FORMAT: tl.constexpr, q, a, s, t, R: tl.constexpr, B: tl.constexpr):
    """Two tiles `[R, B * 16]` float16 from what `fetch` gave."""
    if FORMAT == "Q8_0":
        low = tl.inline_asm_elementwise(_EIGHT, "=r,=r,r", [q], dtype=tl.float16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_EIGHT, "=r,=r,r", [a], dtype=tl.float16, is_pure=True, pack=4)
        H: tl.constexpr = B // 2
        low, high = _times(tl.reshape(low, [R, H, 32]), s, R, H, 32), _times(tl.reshape(high, [R, H, 32]), t, R, H, 32)
    else:
        q = tl.reshape(q, [R, B, 16])
        j = tl.arange(0, 16)[None, None, :]
        if FORMAT == "MXFP4":
            low, high = tl.inline_asm_elementwise(
                _E2M1, "=r,=r,=r,=r,r", [q], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
            # Beyond these a weight is no number of float16: 2^-25 makes zeros, 2^15 times 6 is infinite.
            e = tl.minimum(tl.maximum(s.to(tl.int32), 102), 142)
            power = ((e << 23).to(tl.float32, bitcast=True)).to(tl.float16)
            low, high = _times(low, power, R, B, 16), _times(high, power, R, B, 16)
        elif FORMAT == "Q4_0":
            low, high = tl.inline_asm_elementwise(
                _FOUR_LESS_8, "=r,=r,=r,=r,r", [q], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
            low, high = _times(low, s, R, B, 16), _times(high, s, R, B, 16)
        elif FORMAT == "Q5_0":
            word = a[:, :, None]
            low, high = tl.inline_asm_elementwise(
                _FIVE_LESS_16, _MORE_OPERANDS, [q, word >> j, word >> (j + 16)], dtype=(tl.float16, tl.float16),
                is_pure=True, pack=4,
            )  # fmt: skip
            low, high = _times(low, s, R, B, 16), _times(high, s, R, B, 16)
        elif FORMAT == "Q6_K":
            u_low, u_high = tl.split(tl.reshape(a, [R, B, 2]))
            low, high = tl.inline_asm_elementwise(
                _SIX_LESS_32, _MORE_OPERANDS, [q, u_low[:, :, None] >> (j * 2), u_high[:, :, None] >> (j * 2)],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
            d, _ = _pair(_spread(t, R, B))
            both, d = s.to(tl.int32), d.to(tl.float32)
            s_low = (((both << 24) >> 24).to(tl.float32) * d).to(tl.float16)
            s_high = ((both >> 8).to(tl.float32) * d).to(tl.float16)
            low, high = _times(low, s_low, R, B, 16), _times(high, s_high, R, B, 16)
        else:
            # Codes less the middle of their range: what is added then is small, and its rounding with it.
            MIDDLE: tl.constexpr = 8.0 if FORMAT == "Q4_K" or FORMAT == "Q4_1" else 16.0
            if FORMAT == "Q4_1" or FORMAT == "Q5_1":
                d, m = _pair(s)
                m = (m.to(tl.float32) + MIDDLE * d.to(tl.float32)).to(tl.float16)
            else:
                d, dmin = _pair(_spread(t, R, B))
                both = s.to(tl.int32)
                step = (both & 255).to(tl.float32) * d.to(tl.float32)
                m = (MIDDLE * step - ((both >> 8) & 255).to(tl.float32) * dmin.to(tl.float32)).to(tl.float16)
                d = step.to(tl.float16)
            if FORMAT == "Q4_K" or FORMAT == "Q4_1":
                low, high = tl.inline_asm_elementwise(
                    _FOUR_LESS_8, "=r,=r,=r,=r,r", [q], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
                )
            else:
                word = a[:, :, None]
                low, high = tl.inline_asm_elementwise(
                    _FIVE_LESS_16, _MORE_OPERANDS, [q, word >> j, word >> (j + 16)], dtype=(tl.float16, tl.float16),
                    is_pure=True, pack=4,
                )  # fmt: skip
            low, high = _times_plus(low, d, m, R, B), _times_plus(high, d, m, R, B)
    return tl.reshape(low, [R, B * 16]), tl.reshape(high, [R, B * 16])


@triton.jit
def _pair(word):
    """Two float16 values of a word."""
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    return low, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _times(q, s, R: tl.constexpr, B: tl.constexpr, L: tl.constexpr):
    s = tl.broadcast_to(s[:, :, None], [R, B, L])
    return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [q, s], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _times_plus(q, s, m, R: tl.constexpr, B: tl.constexpr):
    s, m = tl.broadcast_to(s[:, :, None], [R, B, 16]), tl.broadcast_to(m[:, :, None], [R, B, 16])
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [q, s, m], dtype=tl.float16, is_pure=True, pack=2
    )
