"""Integer products of packed codes with int8x2 activations: what the formats' `products` are made of.

Four products and their sum are one dp4a, so sums over a block are exact and the same in any order; scales are applied once
a block, in float32. A tile is R rows by W words of codes, four of them to a thread: `split4` then costs nothing, and four
words of a block chain through one accumulator. ASM is off in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    """Byte i is byte number (nibble i of `which`, 0 to 7) of the eight in low and high; from 8 on eight copies of the upper
    bit of byte number nibble - 8."""
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
            byte = (word >> ((at & 3) * 8)) & 255
            byte = tl.where(((which >> (4 * i)) & 8) == 8, (byte >> 7) * 255, byte)
            y = y | (byte << (8 * i))
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
def opaque(i, ASM: tl.constexpr):
    """The scalar i, of which the compiler no longer knows what divides it: else it would load scales of neighbouring blocks
    into one thread, away from the thread that has their codes."""
    if ASM:
        i = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=True, pack=1)
    return i


@triton.jit
def masked_load(p, ok, MASK: tl.constexpr):
    if MASK:
        v = tl.load(p, mask=ok, other=0)
    else:
        v = tl.load(p)
    return v


@triton.jit
def load_codes(codes, n, start, KW: tl.constexpr, W: tl.constexpr):
    """Words start.. [W] of rows n [R], of KW words each."""
    w = start + tl.arange(0, W)
    p = codes + n[:, None] * KW + w[None, :]
    if KW % W != 0:
        q = tl.load(p, mask=(w < KW)[None, :], other=0, eviction_policy="evict_first")
    else:
        q = tl.load(p, eviction_policy="evict_first")
    return q


@triton.jit
def load_blocks(p, n, start, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """[R, W / 4] of a plane with an entry a block, in the thread that has the block's four words of nibbles."""
    block = opaque(start // 4, ASM) + tl.arange(0, W // 4)
    there = (block < K // 32)[None, :]
    return masked_load(p + (n[:, None] * (K // 32) + block[None, :]), there, K // 8 % W != 0)


@triton.jit
def load_spread(
    p, first, N, start, STRIDE: tl.constexpr, PER: tl.constexpr, R: tl.constexpr, S: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """[R, S] of a plane with an entry for PER tiles of four words, STRIDE a row: loaded flat, which leaves each in the
    thread that has its codes. Loaded as [R, S], Triton 3.6 would give rows to neighbouring threads."""
    i = tl.arange(0, R * S)
    row = tl.minimum(first + i // S, N - 1).to(tl.int64)
    entry = (start // 4 + i % S) // PER
    v = masked_load(p + row * STRIDE + entry, entry < STRIDE, MASK)
    return tl.reshape(v, (R, S))


@triton.jit
def load_tops(p, first, N, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr):
    """[R, W / 4] of a plane with an entry for 256 columns."""
    return load_spread(p, first, N, start, K // 256, 8, R, W // 4, K // 8 % W != 0)


@triton.jit
def split_nibbles(q, R: tl.constexpr, W: tl.constexpr):
    """The codes of a block as bytes: four words of its first 16 columns, four of the others."""
    M: tl.constexpr = 0x0F0F0F0F
    a, b, c, d = split4(q, R, W // 4)
    e, f, g, h = (a >> 4) & M, (b >> 4) & M, (c >> 4) & M, (d >> 4) & M
    return a & M, b & M, c & M, d & M, e, f, g, h


@triton.jit
def table_bytes(q, A, B, C, D, ASM: tl.constexpr):
    """The entries of a table of 16 bytes (A to D, the first lowest) that a word's codes stand for: those of the low
    nibbles, and of the high ones."""
    first = _four(q, A, B, C, D, ASM)
    second = _four(q >> 16, A, B, C, D, ASM)
    return choose_bytes(first, second, q * 0 + 0x6420, ASM), choose_bytes(first, second, q * 0 + 0x7531, ASM)


@triton.jit
def _four(q, a, b, c, d, ASM: tl.constexpr):
    """Entries by the four lower nibbles."""
    at = q & 0x7777
    plus = choose_bytes(a, b, at, ASM)
    minus = choose_bytes(c, d, at, ASM)
    mask = choose_bytes(0x0000FF00, 0, (q >> 3) & 0x1111, ASM)
    return (plus & ~mask) | (minus & mask)


@triton.jit
def split_table(q, A, B, C, D, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """`split_nibbles`, of the bytes that codes stand for."""
    a, b, c, d = split4(q, R, W // 4)
    a, e = table_bytes(a, A, B, C, D, ASM)
    b, f = table_bytes(b, A, B, C, D, ASM)
    c, g = table_bytes(c, A, B, C, D, ASM)
    d, h = table_bytes(d, A, B, C, D, ASM)
    return a, b, c, d, e, f, g, h


@triton.jit
def _kept(v, ASM: tl.constexpr):
    """v, in a register of each thread: constants would be moved to one before each use."""
    if ASM:
        v = tl.inline_asm_elementwise(
            "{ .reg .u32 t; mov.u32 t, %tid.x; shr.u32 t, t, 16; add.u32 $0, $1, t; }", "=r,r", [v], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    return v


@triton.jit
def signed_bytes(q, A, B, C, D, ASM: tl.constexpr):
    """The bytes that a word's codes of a sign and three bits stand for: A and B those of no sign, C and D those of a sign,
    all less than 128. The device makes zeros of the others' codes, so that the two are joined by one operation."""
    other = q ^ -0x77777778
    first = choose_bytes(A, B, q, ASM) | choose_bytes(C, D, other, ASM)
    second = choose_bytes(A, B, q >> 16, ASM) | choose_bytes(C, D, other >> 16, ASM)
    return choose_bytes(first, second, q * 0 + 0x6420, ASM), choose_bytes(first, second, q * 0 + 0x7531, ASM)


@triton.jit
def split_signed(q, A, B, C, D, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """`split_nibbles`, of the bytes that codes stand for."""
    a, b, c, d = split4(q, R, W // 4)
    A, B, C, D = _kept(a * 0 + A, ASM), _kept(a * 0 + B, ASM), _kept(a * 0 + C, ASM), _kept(a * 0 + D, ASM)
    a, e = signed_bytes(a, A, B, C, D, ASM)
    b, f = signed_bytes(b, A, B, C, D, ASM)
    c, g = signed_bytes(c, A, B, C, D, ASM)
    d, h = signed_bytes(d, A, B, C, D, ASM)
    return a, b, c, d, e, f, g, h


@triton.jit
def _one_bit(word, i, codes):
    y = (word >> (4 * i)) & 15
    return codes | ((y * 0x02040810) & 0x10101010)


@triton.jit
def fifth_bits(codes, word):
    """The eight words of a block with bit j of `word` above column j."""
    a, b, c, d, e, f, g, h = codes
    a, b, c, d = _one_bit(word, 0, a), _one_bit(word, 1, b), _one_bit(word, 2, c), _one_bit(word, 3, d)
    e, f, g, h = _one_bit(word, 4, e), _one_bit(word, 5, f), _one_bit(word, 6, g), _one_bit(word, 7, h)
    return a, b, c, d, e, f, g, h


@triton.jit
def whole_block(codes, x, R: tl.constexpr, W: tl.constexpr, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """Products of all 32 columns [R, W / 4]: integers, 1 / x's scale of the result."""
    a, b, c, d, e, f, g, h = codes
    xa, xb, xc, xd, ya, yb, yc, yd, ua, ub, uc, ud, va, vb, vc, vd, _, _, _ = x
    total = chain(a, b, c, d, xa, xb, xc, xd, tl.zeros([R, W // 4], tl.int32), SIGNED, ASM)
    total = chain(e, f, g, h, ua, ub, uc, ud, total, SIGNED, ASM) * 128
    total = chain(a, b, c, d, ya, yb, yc, yd, total, SIGNED, ASM)
    return chain(e, f, g, h, va, vb, vc, vd, total, SIGNED, ASM)


@triton.jit
def half_blocks(codes, x, R: tl.constexpr, W: tl.constexpr, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """The same for the first and the last 16 columns."""
    a, b, c, d, e, f, g, h = codes
    xa, xb, xc, xd, ya, yb, yc, yd, ua, ub, uc, ud, va, vb, vc, vd, _, _, _ = x
    zero = tl.zeros([R, W // 4], tl.int32)
    low = chain(a, b, c, d, xa, xb, xc, xd, zero, SIGNED, ASM) * 128
    low = chain(a, b, c, d, ya, yb, yc, yd, low, SIGNED, ASM)
    high = chain(e, f, g, h, ua, ub, uc, ud, zero, SIGNED, ASM) * 128
    return low, chain(e, f, g, h, va, vb, vc, vd, high, SIGNED, ASM)
