"""Values of packed weights, in the kernel: two tiles `[R, B, 16]` float32, the halves of B blocks of 32 columns in R rows.

Every format is four planes (`pack.py` makes them). `codes`: a byte holds columns j and j + 16 of a block, so that a 16-byte
load is one block of 4-bit codes; the 8-bit and wide types have a value a column, the 2-bit types words. `bits`: the upper
bits of the codes, as words. `scale`: one or two entries a block. `top`: a few entries per 256 columns. What a mask leaves
out decodes to zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The 16 values of IQ4_NL plus 128, four to a word: two's complement, so that the words are plain int32.
_IQ4_A: tl.constexpr = tl.constexpr(0x3F2D1801)
_IQ4_B: tl.constexpr = tl.constexpr(0x766A5D4F)
_IQ4_C: tl.constexpr = tl.constexpr(0xA6998D81 - (1 << 32))
_IQ4_D: tl.constexpr = tl.constexpr(0xF1D9C5B5 - (1 << 32))
# Twice the magnitudes of e2m1, one to a nibble.
_E2M1: tl.constexpr = tl.constexpr(0xC8643210 - (1 << 32))


@triton.jit
def halves(FORMAT: tl.constexpr, codes, bits, scale, top, row, block, row_ok, K):
    """Low and high half of blocks `block` [B] of rows `row` [R] (int64), each `[R, B, 16]` float32; K columns a row."""
    n_blocks = (K + 31) // 32
    at = row[:, None] * n_blocks + block[None, :]  # [R, B]
    ok = row_ok[:, None] & (block < n_blocks)[None, :]  # [R, B]
    if FORMAT == "F32" or FORMAT == "F16" or FORMAT == "BF16":
        low, high = _wide(FORMAT, codes, row, block, row_ok, K)
    elif FORMAT == "Q8_0":
        d = tl.load(scale + at, mask=ok, other=0.0).to(tl.float32)[:, :, None]
        low, high = _bytes(codes, at, ok)
        low, high = low * d, high * d
    elif FORMAT == "Q4_0" or FORMAT == "Q5_0":
        d = tl.load(scale + at, mask=ok, other=0.0).to(tl.float32)[:, :, None]
        q_low, q_high = _nibbles(codes, at, ok)
        if FORMAT == "Q5_0":
            h_low, h_high = _one_bit(bits, at, ok)
            low, high = (q_low + h_low * 16 - 16).to(tl.float32) * d, (q_high + h_high * 16 - 16).to(tl.float32) * d
        else:
            low, high = (q_low - 8).to(tl.float32) * d, (q_high - 8).to(tl.float32) * d
    elif FORMAT == "Q4_1" or FORMAT == "Q5_1":
        d = tl.load(scale + at * 2, mask=ok, other=0.0).to(tl.float32)[:, :, None]
        m = tl.load(scale + at * 2 + 1, mask=ok, other=0.0).to(tl.float32)[:, :, None]
        q_low, q_high = _nibbles(codes, at, ok)
        if FORMAT == "Q5_1":
            h_low, h_high = _one_bit(bits, at, ok)
            q_low, q_high = q_low + h_low * 16, q_high + h_high * 16
        low, high = q_low.to(tl.float32) * d + m, q_high.to(tl.float32) * d + m
    elif FORMAT == "IQ4_NL":
        d = tl.load(scale + at, mask=ok, other=0.0).to(tl.float32)[:, :, None]
        q_low, q_high = _nibbles(codes, at, ok)
        low, high = _iq4(q_low) * d, _iq4(q_high) * d
    elif FORMAT == "MXFP4":
        d = _e8m0_half(tl.load(scale + at, mask=ok, other=0).to(tl.int32))[:, :, None]
        q_low, q_high = _nibbles(codes, at, ok)
        low, high = _e2m1(q_low) * d, _e2m1(q_high) * d
    else:
        low, high = _super(FORMAT, codes, bits, scale, top, row, block, at, ok, K // 256)
    return low, high


@triton.jit
def _super(FORMAT: tl.constexpr, codes, bits, scale, top, row, block, at, ok, n_super):
    """The formats with a second level of scales, 256 columns each."""
    of = row[:, None] * n_super + (block // 8)[None, :]  # [R, B]
    if FORMAT == "Q4_K" or FORMAT == "Q5_K":
        d = tl.load(top + of * 2, mask=ok, other=0.0).to(tl.float32)
        dmin = tl.load(top + of * 2 + 1, mask=ok, other=0.0).to(tl.float32)
        s = (tl.load(scale + at * 2, mask=ok, other=0).to(tl.float32) * d)[:, :, None]
        m = (tl.load(scale + at * 2 + 1, mask=ok, other=0).to(tl.float32) * dmin)[:, :, None]
        q_low, q_high = _nibbles(codes, at, ok)
        if FORMAT == "Q5_K":
            h_low, h_high = _one_bit(bits, at, ok)
            q_low, q_high = q_low + h_low * 16, q_high + h_high * 16
        low, high = q_low.to(tl.float32) * s - m, q_high.to(tl.float32) * s - m
    elif FORMAT == "Q6_K":
        d = tl.load(top + of, mask=ok, other=0.0).to(tl.float32)
        s_low = (tl.load(scale + at * 2, mask=ok, other=0).to(tl.float32) * d)[:, :, None]
        s_high = (tl.load(scale + at * 2 + 1, mask=ok, other=0).to(tl.float32) * d)[:, :, None]
        q_low, q_high = _nibbles(codes, at, ok)
        h_low, h_high = _two_bits(bits, at, ok)
        low, high = (q_low + h_low * 16 - 32).to(tl.float32) * s_low, (q_high + h_high * 16 - 32).to(tl.float32) * s_high
    elif FORMAT == "IQ4_XS":
        d = tl.load(top + of, mask=ok, other=0.0).to(tl.float32)
        s = (tl.load(scale + at, mask=ok, other=0).to(tl.float32) * d)[:, :, None]
        q_low, q_high = _nibbles(codes, at, ok)
        low, high = _iq4(q_low) * s, _iq4(q_high) * s
    elif FORMAT == "Q2_K":
        d = tl.load(top + of * 2, mask=ok, other=0.0).to(tl.float32)[:, :, None]
        dmin = tl.load(top + of * 2 + 1, mask=ok, other=0.0).to(tl.float32)[:, :, None]
        s_low = tl.load(scale + at * 2, mask=ok, other=0).to(tl.int32)[:, :, None]
        s_high = tl.load(scale + at * 2 + 1, mask=ok, other=0).to(tl.int32)[:, :, None]
        q_low, q_high = _two_bits(codes, at, ok)
        low = q_low.to(tl.float32) * ((s_low & 15).to(tl.float32) * d) - (s_low >> 4).to(tl.float32) * dmin
        high = q_high.to(tl.float32) * ((s_high & 15).to(tl.float32) * d) - (s_high >> 4).to(tl.float32) * dmin
    else:
        tl.static_assert(FORMAT == "Q3_K", "unknown format")
        # `top` is d, then 32 bits: the upper two bits of the sixteen 6-bit scales, a nibble for each block.
        d = tl.load(top + of * 3, mask=ok, other=0.0).to(tl.float32)
        upper = tl.load(top + of * 3 + 1 + (block // 4 % 2)[None, :], mask=ok, other=0.0).to(tl.int16, bitcast=True)
        upper = upper.to(tl.int32) >> (block % 4 * 4)[None, :]
        lower = tl.load(scale + at, mask=ok, other=0).to(tl.int32)
        s_low = ((((lower & 15) | ((upper & 3) << 4)) - 32).to(tl.float32) * d)[:, :, None]
        s_high = ((((lower >> 4) | ((upper & 12) << 2)) - 32).to(tl.float32) * d)[:, :, None]
        q_low, q_high = _two_bits(codes, at, ok)
        h_low, h_high = _one_bit(bits, at, ok)
        low = (q_low + h_low * 4 - 4).to(tl.float32) * s_low
        high = (q_high + h_high * 4 - 4).to(tl.float32) * s_high
    return low, high


@triton.jit
def _wide(FORMAT: tl.constexpr, values, row, block, row_ok, K):
    """One stored value per column; K need not be whole blocks."""
    column = (block * 32)[None, :, None] + tl.arange(0, 16)[None, None, :]  # [1, B, 16]
    at = row[:, None, None] * K + column
    ok = row_ok[:, None, None]
    low = tl.load(values + at, mask=ok & (column < K), other=0)
    high = tl.load(values + at + 16, mask=ok & (column + 16 < K), other=0)
    if FORMAT == "BF16":
        # Held as int16: the interpreter computes bfloat16 wrongly, and a shift is exact everywhere.
        low = (low.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        high = (high.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _bytes(codes, at, ok):
    p = codes + at[:, :, None] * 32 + tl.arange(0, 16)[None, None, :]
    low = tl.load(p, mask=ok[:, :, None], other=0)
    high = tl.load(p + 16, mask=ok[:, :, None], other=0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _nibbles(codes, at, ok):
    p = codes + at[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    q = tl.load(p, mask=ok[:, :, None], other=0).to(tl.int32)  # [R, B, 16]
    return q & 15, q >> 4


@triton.jit
def _two_bits(words, at, ok):
    """Two words a block: bits 2j and 2j + 1 of the first are column j, of the second column j + 16."""
    shift = tl.arange(0, 16)[None, None, :] * 2
    low = tl.load(words + at * 2, mask=ok, other=0)[:, :, None]
    high = tl.load(words + at * 2 + 1, mask=ok, other=0)[:, :, None]
    return (low >> shift) & 3, (high >> shift) & 3


@triton.jit
def _one_bit(words, at, ok):
    """One word a block: bit j is column j."""
    j = tl.arange(0, 16)[None, None, :]
    word = tl.load(words + at, mask=ok, other=0)[:, :, None]
    return (word >> j) & 1, (word >> (j + 16)) & 1


@triton.jit
def _iq4(q):
    word = tl.where(q < 8, tl.where(q < 4, _IQ4_A, _IQ4_B), tl.where(q < 12, _IQ4_C, _IQ4_D))
    return (((word >> ((q & 3) * 8)) & 255) - 128).to(tl.float32)


@triton.jit
def _e2m1(q):
    word = tl.full([1, 1, 1], _E2M1, tl.int32)
    twice = ((word >> ((q & 7) * 4)) & 15).to(tl.float32)
    return tl.where(q < 8, twice, -twice)


@triton.jit
def _e8m0_half(e):
    """2^(e - 128); the two smallest are below float32's normal numbers."""
    bits = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23)
    return bits.to(tl.float32, bitcast=True)
