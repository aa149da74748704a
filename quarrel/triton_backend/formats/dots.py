"""Products of packed weights with one row of activations, int8x2 (`int8x2.py`) or floats: what matvec kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.formats.int8_dots import masked_load, opaque, split4
from quarrel.triton_backend.formats.int8x2 import to_int8x2
from quarrel.triton_backend.formats.table import format_of, word_columns


@triton.jit
def load_tile(
    FORMAT: tl.constexpr, w, n, first, N, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """All of a weight w in rows first.. (n [R]) and words start.. [W]: codes, upper bits, scales and tops of its blocks.

    All of it comes from memory, so all of it is requested a tile ahead, and may be before the activations are there.
    """
    return format_of(FORMAT).dots.load(w, n, first, N, start, K, R, W, ASM)


@triton.jit
def load_x(FORMAT: tl.constexpr, x, start, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """What a tile from word `start` multiplies: sixteen words of each block's high and low codes (of bytes, eight), their
    scales and the sums of both; of floats, themselves. All are [1, ..], and in the thread that has the block's codes."""
    if word_columns(FORMAT) == 1:
        i = start + tl.arange(0, W)
        row = (masked_load(x + i, i < K, K % W != 0).to(tl.float32)[None, :],)
    elif word_columns(FORMAT) == 4:
        row = _for_bytes(x, start, K, W, ASM)
    else:
        row = _for_nibbles(x, start, K, W, ASM)
    return row


@triton.jit
def _for_bytes(x, start, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    # Four words are half a block: low columns and high ones take turns.
    KW: tl.constexpr = K // 8
    C: tl.constexpr = W // 4
    MASK: tl.constexpr = (K // 4) % W != 0
    half = opaque(start // 4, ASM) + tl.arange(0, C)
    ok = half < K // 16
    plain = start // 4 + tl.arange(0, C)
    at = (plain % 2 * 2 * KW + plain // 2 * 4)[:, None] + tl.arange(0, 4)[None, :]  # [C, 4]
    high = masked_load(x + at, ok[:, None], MASK)
    low = masked_load(x + KW + at, ok[:, None], MASK)
    ha, hb, hc, hd = split4(tl.reshape(high, (1, W)), 1, C)
    la, lb, lc, ld = split4(tl.reshape(low, (1, W)), 1, C)
    s = masked_load(x + 4 * KW + half // 2, ok, MASK).to(tl.float32, bitcast=True)[None, :]
    return ha, hb, hc, hd, la, lb, lc, ld, s


@triton.jit
def _for_nibbles(x, start, K: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    KW: tl.constexpr = K // 8
    KS: tl.constexpr = K // 32
    S: tl.constexpr = W // 4
    MASK: tl.constexpr = KW % W != 0
    w = start + tl.arange(0, W)
    block = opaque(start // 4, ASM) + tl.arange(0, S)
    ok = w < KW
    there = block < KS
    p = x + w
    xa, xb, xc, xd = _words(p, ok, S, MASK)
    ya, yb, yc, yd = _words(p + KW, ok, S, MASK)
    ua, ub, uc, ud = _words(p + 2 * KW, ok, S, MASK)
    va, vb, vc, vd = _words(p + 3 * KW, ok, S, MASK)
    s = masked_load(x + 4 * KW + block, there, MASK).to(tl.float32, bitcast=True)[None, :]
    first = masked_load(x + 4 * KW + KS + block, there, MASK)[None, :]
    second = masked_load(x + 4 * KW + 2 * KS + block, there, MASK)[None, :]
    return xa, xb, xc, xd, ya, yb, yc, yd, ua, ub, uc, ud, va, vb, vc, vd, s, first, second


@triton.jit
def _words(p, ok, S: tl.constexpr, MASK: tl.constexpr):
    return split4(masked_load(p, ok, MASK)[None, :], 1, S)


@triton.jit
def made_x(FORMAT: tl.constexpr, v):
    """`load_x` of a whole row [B, 2, 16] float32 that is in registers, for a format that reads int8x2."""
    B: tl.constexpr = v.shape[0]
    high, low, s, sums = to_int8x2(v)
    if word_columns(FORMAT) == 4:
        ha, hb, hc, hd = split4(tl.reshape(high, (1, B * 8)), 1, B * 2)
        la, lb, lc, ld = split4(tl.reshape(low, (1, B * 8)), 1, B * 2)
        s, _, _, _ = split4(tl.reshape(tl.broadcast_to(s[:, None, None], (B, 2, 4)), (1, B * 8)), 1, B * 2)
        row = (ha, hb, hc, hd, la, lb, lc, ld, s)
    else:
        x, u = tl.split(tl.permute(high, (0, 2, 1)))
        y, v = tl.split(tl.permute(low, (0, 2, 1)))
        xa, xb, xc, xd = split4(tl.reshape(x, (1, B * 4)), 1, B)
        ya, yb, yc, yd = split4(tl.reshape(y, (1, B * 4)), 1, B)
        ua, ub, uc, ud = split4(tl.reshape(u, (1, B * 4)), 1, B)
        va, vb, vc, vd = split4(tl.reshape(v, (1, B * 4)), 1, B)
        first, second = tl.split(sums)
        row = xa, xb, xc, xd, ya, yb, yc, yd, ua, ub, uc, ud, va, vb, vc, vd, s[None, :], first[None, :], second[None, :]
    return row


@triton.jit
def products(
    FORMAT: tl.constexpr, q, upper, scales, tops, x, R: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """[R, W / 4] float32 whose sums over the rows are the products of a tile (`load_tile`) with x (`load_x`); [R, W] for
    floats."""
    return format_of(FORMAT).dots.products(FORMAT, q, upper, scales, tops, x, R, W, ASM)


@triton.jit
def tile_products(
    FORMAT: tl.constexpr, q, upper, scales, tops, x, start, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The same with a row of activations in memory, from word `start` on."""
    return products(FORMAT, q, upper, scales, tops, load_x(FORMAT, x, start, K, W, ASM), R, W, ASM)
