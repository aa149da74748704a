"""Products of packed weights with one row of halved activations, in integers: what the few-row kernels share.

An activation is s * (128 high + low), two int8 halves with a scale per 32 columns (`halved.py` makes them); a weight is a
small integer with the format's own scales. Four products and their sum are one dp4a, so sums over a block are exact and
the same in any order; scales are applied once a block, in float32. A tile is R rows by W words of codes, four of them to a
thread: `split4` then costs nothing, and four words of a block chain through one accumulator. ASM is off in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORDS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "MXFP4", "Q5_0", "Q4_1", "Q5_1", "IQ4_NL", "IQ4_XS")
"""Formats whose codes are multiplied as integers."""
FLOATS = ("F16", "BF16")

# Twice the magnitudes of e2m1 as bytes, and their negatives.
_PLUS_LOW: tl.constexpr = tl.constexpr(0x03020100)
_PLUS_HIGH: tl.constexpr = tl.constexpr(0x0C080604)
_MINUS_LOW: tl.constexpr = tl.constexpr(0xFDFEFF00 - (1 << 32))
_MINUS_HIGH: tl.constexpr = tl.constexpr(0xF4F8FAFC - (1 << 32))
# The 16 values of IQ4_NL as bytes.
_IQ4_A: tl.constexpr = tl.constexpr(0xBFAD9881 - (1 << 32))
_IQ4_B: tl.constexpr = tl.constexpr(0xF6EADDCF - (1 << 32))
_IQ4_C: tl.constexpr = tl.constexpr(0x26190D01)
_IQ4_D: tl.constexpr = tl.constexpr(0x71594535)


@triton.jit
def dot4(a, b, c, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """c + the sum of the products of four bytes; b is signed, a by SIGNED."""
    a, b = tl.broadcast(a, b)
    if ASM:
        if SIGNED:
            c = tl.inline_asm_elementwise(
                "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            c = tl.inline_asm_elementwise(
                "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
            )
    else:
        for i in tl.static_range(4):
            byte = (a << (24 - 8 * i)) >> 24
            if not SIGNED:
                byte = byte & 255
            c += byte * ((b << (24 - 8 * i)) >> 24)
    return c


@triton.jit
def choose_bytes(low, high, which, ASM: tl.constexpr):
    """Byte i is byte number (nibble i of `which`, 0 to 7) of the eight in low and high."""
    if ASM:
        low, high, which = low + which * 0, high + which * 0, which
        y = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, which], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        y = which * 0
        for i in tl.static_range(4):
            at = (which >> (4 * i)) & 7
            word = tl.where(at < 4, low, high)
            y = y | (((word >> ((at & 3) * 8)) & 255) << (8 * i))
    return y


@triton.jit
def split4(v, A: tl.constexpr, B: tl.constexpr):
    """[A, 4 B] to four of [A, B]: neighbours go to different results."""
    even, odd = tl.split(tl.reshape(v, (A, B, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def chain(a, b, c, d, xa, xb, xc, xd, total, SIGNED: tl.constexpr, ASM: tl.constexpr):
    total = dot4(a, xa, total, SIGNED, ASM)
    total = dot4(b, xb, total, SIGNED, ASM)
    total = dot4(c, xc, total, SIGNED, ASM)
    return dot4(d, xd, total, SIGNED, ASM)


@triton.jit
def somewhere(i, ASM: tl.constexpr):
    """The scalar i, of which the compiler no longer knows what divides it: else it would load scales of neighbouring blocks
    into one thread, away from the thread that has their codes."""
    if ASM:
        i = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=True, pack=1)
    return i


@triton.jit
def _spread(
    p, first, N, start, STRIDE: tl.constexpr, PER: tl.constexpr, R: tl.constexpr, S: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """[R, S] of a plane with an entry for PER tiles of four words, STRIDE a row: loaded flat, which leaves each in the
    thread that has its codes. Loaded as [R, S], Triton 3.6 would give rows to neighbouring threads."""
    i = tl.arange(0, R * S)
    row = tl.minimum(first + i // S, N - 1).to(tl.int64)
    entry = (start // 4 + i % S) // PER
    v = _load(p + row * STRIDE + entry, entry < STRIDE, MASK)
    return tl.reshape(v, (R, S))


@triton.jit
def _words(p, ok, S: tl.constexpr, MASK: tl.constexpr):
    if MASK:
        v = tl.load(p, mask=ok, other=0)
    else:
        v = tl.load(p)
    return split4(v[None, :], 1, S)


@triton.jit
def _load(p, ok, MASK: tl.constexpr):
    if MASK:
        v = tl.load(p, mask=ok, other=0)
    else:
        v = tl.load(p)
    return v


@triton.jit
def _half(v):
    """The float16 in the low bits of an int32."""
    return v.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _two_bits(word, i, codes):
    """Four codes with upper bits 2 * (columns 4i..4i+3) of `word` over them."""
    y = (word >> (8 * i)) & 255
    y = (y * 0x1001) & 0x000F000F
    return codes | ((y * 0x410) & 0x30303030)


@triton.jit
def _one_bit(word, i, codes):
    y = (word >> (4 * i)) & 15
    return codes | ((y * 0x02040810) & 0x10101010)


@triton.jit
def _signed(FORMAT: tl.constexpr, q, ASM: tl.constexpr):
    """The values of a word's codes as signed bytes (of e2m1, twice them): of the low and of the high nibbles."""
    if FORMAT == "MXFP4":
        first = _four(q, _PLUS_LOW, _PLUS_HIGH, _MINUS_LOW, _MINUS_HIGH, ASM)
        second = _four(q >> 16, _PLUS_LOW, _PLUS_HIGH, _MINUS_LOW, _MINUS_HIGH, ASM)
    else:
        first = _four(q, _IQ4_A, _IQ4_B, _IQ4_C, _IQ4_D, ASM)
        second = _four(q >> 16, _IQ4_A, _IQ4_B, _IQ4_C, _IQ4_D, ASM)
    return choose_bytes(first, second, q * 0 + 0x6420, ASM), choose_bytes(first, second, q * 0 + 0x7531, ASM)


@triton.jit
def _four(q, a, b, c, d, ASM: tl.constexpr):
    """Entries of a table of 16 bytes by the four lower nibbles."""
    at = q & 0x7777
    plus = choose_bytes(a, b, at, ASM)
    minus = choose_bytes(c, d, at, ASM)
    mask = choose_bytes(0x0000FF00, 0, (q >> 3) & 0x1111, ASM)
    return (plus & ~mask) | (minus & mask)


@triton.jit
def load_tile(
    FORMAT: tl.constexpr, codes, bits, scale, top, n, first, N, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """All of a weight in rows first.. (n [R]) and words start.. [W]: codes, upper bits, scales and tops of its blocks.

    All of it comes from memory, so all of it is asked for a tile ahead, and may be before the activations are there.
    """
    FLOAT: tl.constexpr = FORMAT == "F16" or FORMAT == "BF16"
    KW: tl.constexpr = K if FLOAT else (K // 4 if FORMAT == "Q8_0" else K // 8)
    MASK: tl.constexpr = KW % W != 0
    S: tl.constexpr = W // 4
    w = start + tl.arange(0, W)
    p = codes + n[:, None] * KW + w[None, :]
    if MASK:
        q = tl.load(p, mask=(w < KW)[None, :], other=0, eviction_policy="evict_first")
    else:
        q = tl.load(p, eviction_policy="evict_first")
    upper, scales, tops = 0, 0, 0
    if FORMAT == "Q8_0":
        scales = _spread(scale, first, N, start, K // 32, 2, R, S, MASK)
    elif not FLOAT:
        block = somewhere(start // 4, ASM) + tl.arange(0, S)
        at = n[:, None] * (K // 32) + block[None, :]
        there = (block < K // 32)[None, :]
        scales = _load(scale + at, there, MASK)
        if FORMAT == "Q5_K" or FORMAT == "Q6_K" or FORMAT == "Q5_0" or FORMAT == "Q5_1":
            upper = _load(bits + at, there, MASK)
        if FORMAT == "Q4_K" or FORMAT == "Q5_K" or FORMAT == "Q6_K" or FORMAT == "IQ4_XS":
            tops = _spread(top, first, N, start, K // 256, 8, R, S, MASK)
    return q, upper, scales, tops


@triton.jit
def load_row(FORMAT: tl.constexpr, x, start, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """What a tile from word `start` multiplies: sixteen words of each block's high and low halves (for Q8_0, eight), scales
    and the sums of both halves; of floats, themselves. All are [1, ..], and in the thread that has the block's codes."""
    if FORMAT == "F16" or FORMAT == "BF16":
        w = start + tl.arange(0, W)
        row = (_load(x + w, w < K, K % W != 0).to(tl.float32)[None, :],)
    elif FORMAT == "Q8_0":
        row = _load_halves(x, start, K, W, ASM)
    else:
        row = _load_blocks(x, start, K, W, ASM)
    return row


@triton.jit
def _load_halves(x, start, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    # Four words are half a block: low halves and high halves take turns.
    KW: tl.constexpr = K // 8
    C: tl.constexpr = W // 4
    MASK: tl.constexpr = (K // 4) % W != 0
    half = somewhere(start // 4, ASM) + tl.arange(0, C)
    ok = half < K // 16
    plain = start // 4 + tl.arange(0, C)
    at = (plain % 2 * 2 * KW + plain // 2 * 4)[:, None] + tl.arange(0, 4)[None, :]  # [C, 4]
    high = _load(x + at, ok[:, None], MASK)
    low = _load(x + KW + at, ok[:, None], MASK)
    ha, hb, hc, hd = split4(tl.reshape(high, (1, W)), 1, C)
    la, lb, lc, ld = split4(tl.reshape(low, (1, W)), 1, C)
    s = _load(x + 4 * KW + half // 2, ok, MASK).to(tl.float32, bitcast=True)[None, :]
    return ha, hb, hc, hd, la, lb, lc, ld, s


@triton.jit
def _load_blocks(x, start, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    KW: tl.constexpr = K // 8
    KS: tl.constexpr = K // 32
    S: tl.constexpr = W // 4
    MASK: tl.constexpr = KW % W != 0
    w = start + tl.arange(0, W)
    block = somewhere(start // 4, ASM) + tl.arange(0, S)
    ok = w < KW
    there = block < KS
    p = x + w
    xa, xb, xc, xd = _words(p, ok, S, MASK)
    ya, yb, yc, yd = _words(p + KW, ok, S, MASK)
    ua, ub, uc, ud = _words(p + 2 * KW, ok, S, MASK)
    va, vb, vc, vd = _words(p + 3 * KW, ok, S, MASK)
    s = _load(x + 4 * KW + block, there, MASK).to(tl.float32, bitcast=True)[None, :]
    first = _load(x + 4 * KW + KS + block, there, MASK)[None, :]
    second = _load(x + 4 * KW + 2 * KS + block, there, MASK)[None, :]
    return xa, xb, xc, xd, ya, yb, yc, yd, ua, ub, uc, ud, va, vb, vc, vd, s, first, second


@triton.jit
def tile_products(
    FORMAT: tl.constexpr, q, upper, scales, tops, x, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """[R, W / 4] float32 whose sums over the rows are the products of a tile with x; [R, W] for floats."""
    return products(FORMAT, q, upper, scales, tops, load_row(FORMAT, x, start, K, W, ASM), R, W, ASM)


@triton.jit
def products(
    FORMAT: tl.constexpr, q, upper, scales, tops, row, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The same with a row as `load_row` gives it."""
    if FORMAT == "F16" or FORMAT == "BF16":
        if FORMAT == "BF16":
            y = (q.to(tl.int32) << 16).to(tl.float32, bitcast=True) * row[0]
        else:
            y = q.to(tl.float32) * row[0]
    elif FORMAT == "Q8_0":
        y = _bytes(q, scales, row, R, W, ASM)
    else:
        y = _nibbles(FORMAT, q, upper, scales, tops, row, R, W, ASM)
    return y


@triton.jit
def _bytes(q, scales, row, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    C: tl.constexpr = W // 4
    a, b, c, d = split4(q, R, C)
    zero = tl.zeros([R, C], tl.int32)
    total = chain(a, b, c, d, row[0], row[1], row[2], row[3], zero, True, ASM) * 128
    total = chain(a, b, c, d, row[4], row[5], row[6], row[7], total, True, ASM)
    return total.to(tl.float32) * (scales.to(tl.float32) * row[8])


@triton.jit
def _nibbles(
    FORMAT: tl.constexpr, q, upper, scales, tops, row, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    S: tl.constexpr = W // 4
    SIGNED: tl.constexpr = FORMAT == "MXFP4" or FORMAT == "IQ4_NL" or FORMAT == "IQ4_XS"
    xa, xb, xc, xd, ya, yb, yc, yd, ua, ub, uc, ud, va, vb, vc, vd, s, first, second = row
    a, b, c, d = split4(q, R, S)
    M: tl.constexpr = 0x0F0F0F0F
    if SIGNED:
        a, e = _signed(FORMAT, a, ASM)
        b, f = _signed(FORMAT, b, ASM)
        c, g = _signed(FORMAT, c, ASM)
        d, h = _signed(FORMAT, d, ASM)
    else:
        e, f, g, h = (a >> 4) & M, (b >> 4) & M, (c >> 4) & M, (d >> 4) & M
        a, b, c, d = a & M, b & M, c & M, d & M
    if FORMAT == "Q5_K" or FORMAT == "Q5_0" or FORMAT == "Q5_1":
        a, b, c, d = _one_bit(upper, 0, a), _one_bit(upper, 1, b), _one_bit(upper, 2, c), _one_bit(upper, 3, d)
        e, f, g, h = _one_bit(upper, 4, e), _one_bit(upper, 5, f), _one_bit(upper, 6, g), _one_bit(upper, 7, h)
    elif FORMAT == "Q6_K":
        word = upper.to(tl.int32)
        a, b, c, d = _two_bits(word, 0, a), _two_bits(word, 1, b), _two_bits(word, 2, c), _two_bits(word, 3, d)
        word = (upper >> 32).to(tl.int32)
        e, f, g, h = _two_bits(word, 0, e), _two_bits(word, 1, f), _two_bits(word, 2, g), _two_bits(word, 3, h)
    zero = tl.zeros([R, S], tl.int32)
    if FORMAT == "Q6_K":
        # Each half has a scale, and 32 is taken off by the sums of x.
        lows = chain(a, b, c, d, xa, xb, xc, xd, zero, False, ASM) * 128
        lows = chain(a, b, c, d, ya, yb, yc, yd, lows, False, ASM)
        highs = chain(e, f, g, h, ua, ub, uc, ud, zero, False, ASM) * 128
        highs = chain(e, f, g, h, va, vb, vc, vd, highs, False, ASM)
        lows -= 32 * first
        highs -= 32 * second
        pair, weight = scales.to(tl.int32), tops.to(tl.float32)
        low, high = ((pair << 24) >> 24).to(tl.float32), (pair >> 8).to(tl.float32)
        y = (lows.to(tl.float32) * low + highs.to(tl.float32) * high) * (weight * s)
    else:
        total = chain(a, b, c, d, xa, xb, xc, xd, zero, SIGNED, ASM)
        total = chain(e, f, g, h, ua, ub, uc, ud, total, SIGNED, ASM) * 128
        total = chain(a, b, c, d, ya, yb, yc, yd, total, SIGNED, ASM)
        total = chain(e, f, g, h, va, vb, vc, vd, total, SIGNED, ASM)
        if FORMAT == "Q4_0":
            y = (total - 8 * (first + second)).to(tl.float32) * (scales.to(tl.float32) * s)
        elif FORMAT == "Q5_0":
            y = (total - 16 * (first + second)).to(tl.float32) * (scales.to(tl.float32) * s)
        elif FORMAT == "Q4_1" or FORMAT == "Q5_1":
            y = (_half(scales) * total.to(tl.float32) + _half(scales >> 16) * (first + second).to(tl.float32)) * s
        elif FORMAT == "IQ4_NL":
            y = total.to(tl.float32) * (scales.to(tl.float32) * s)
        elif FORMAT == "IQ4_XS":
            y = (total.to(tl.float32) * scales.to(tl.float32)) * (tops.to(tl.float32) * s)
        elif FORMAT == "MXFP4":
            e8 = scales.to(tl.int32)
            # 2^(e - 128), as the codes are doubled; the two smallest are below float32's normal numbers.
            exponent = tl.where(e8 < 2, 0x00200000 << tl.minimum(e8, 1), (e8 - 1) << 23)
            y = total.to(tl.float32) * (exponent.to(tl.float32, bitcast=True) * s)
        else:
            tl.static_assert(FORMAT == "Q4_K" or FORMAT == "Q5_K", "unknown format")
            pair = scales.to(tl.int32)
            m = ((pair >> 8) & 255).to(tl.float32) * (_half(tops >> 16) * (first + second).to(tl.float32))
            y = ((pair & 255).to(tl.float32) * (_half(tops) * total.to(tl.float32)) - m) * s
    return y
