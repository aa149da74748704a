"""One row of activations held in registers while a program walks many rows of a weight, and the norm before it.

A tile is a whole row of W (so K is at most 8 W), so that a thread has the same columns of every row: activations are read,
normalised and halved once a program, and the next rows are on their way while these are summed. Programs take rows in
turns, R at a time; how many programs there are changes no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.dots import load_row, load_tile, products, row_blocks, row_halves
from quarrel.triton_backend.elementwise import activate
from quarrel.triton_backend.halved import halve


@triton.jit
def row_here(
    FORMAT: tl.constexpr, x, gain, eps, K: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The row in registers: `x` as `load_row` reads it, or with NORM the float32 row before its RMS norm. Waits for x."""
    FLOAT: tl.constexpr = FORMAT == "F16" or FORMAT == "BF16"
    if not NORM:
        if PDL:
            tl.extra.cuda.gdc_wait()
        row = load_row(FORMAT, x, 0, K, W, ASM)
    elif FLOAT:
        w = tl.arange(0, W)
        weight = tl.load(gain + w, mask=w < K, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        v = tl.load(x + w, mask=w < K, other=0.0).to(tl.float32)
        v = v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / K + eps)) * weight
        row = (v[None, :],)
    else:
        S: tl.constexpr = W // 8 if FORMAT == "Q8_0" else W // 4
        if PDL:
            tl.extra.cuda.gdc_wait()
        high, low, s, sums, square = _normed(x, gain, K, S)
        s = s * (1.0 / tl.sqrt(square / K + eps))
        if FORMAT == "Q8_0":
            row = row_halves(high, low, s, S)
        else:
            row = row_blocks(high, low, s, sums, S)
    return row


@triton.jit
def _normed(x, gain, K: tl.constexpr, S: tl.constexpr):
    """Blocks [S] of x times gain, halved, and the sum of the squares of x. Even and odd blocks one after the other: all at
    once take 128 registers, which leaves a multiprocessor room for fewer programs."""
    h0, l0, s0, t0, square0 = _every_other(x, gain, 0, K, S)
    h1, l1, s1, t1, square1 = _every_other(x, gain, 1, K, S)
    high = tl.reshape(tl.permute(tl.join(h0, h1), (0, 3, 1, 2)), (S, 2, 4))
    low = tl.reshape(tl.permute(tl.join(l0, l1), (0, 3, 1, 2)), (S, 2, 4))
    sums = tl.reshape(tl.permute(tl.join(t0, t1), (0, 2, 1)), (S, 2))
    return high, low, tl.reshape(tl.join(s0, s1), (S,)), sums, square0 + square1


@triton.jit
def _every_other(x, gain, which, K: tl.constexpr, S: tl.constexpr):
    block = tl.arange(0, S // 2)[:, None, None] * 2 + which
    column = block * 32 + tl.arange(0, 2)[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    v = tl.load(x + column, mask=block < K // 32, other=0.0).to(tl.float32)
    high, low, s, sums = halve(v * tl.load(gain + column, mask=block < K // 32, other=0.0))
    return high, low, s, sums, tl.sum(tl.sum(tl.sum(v * v, 2), 1), 0)


@triton.jit
def stream_gate_up(
    y, x, gain, eps, gc, gb, gs, gt, uc, ub, us, ut, g_bias, u_bias, N, K: tl.constexpr, FORMAT: tl.constexpr,
    NORM: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """act(gate x) * up x."""
    first = tl.program_id(0) * R
    step = tl.num_programs(0) * R
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    qg, ug, sg, tg = load_tile(FORMAT, gc, gb, gs, gt, n, first, N, 0, K, R, W, ASM)
    qu, uu, su, tu = load_tile(FORMAT, uc, ub, us, ut, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = row_here(FORMAT, x, gain, eps, K, W, NORM, PDL, ASM)
    for at in tl.range(first, N, step, num_stages=1):
        n = tl.minimum(at + step + tl.arange(0, R), N - 1).to(tl.int64)
        qg1, ug1, sg1, tg1 = load_tile(FORMAT, gc, gb, gs, gt, n, at + step, N, 0, K, R, W, ASM)
        qu1, uu1, su1, tu1 = load_tile(FORMAT, uc, ub, us, ut, n, at + step, N, 0, K, R, W, ASM)
        g = tl.sum(products(FORMAT, qg, ug, sg, tg, row, R, W, ASM), 1)
        u = tl.sum(products(FORMAT, qu, uu, su, tu, row, R, W, ASM), 1)
        r = at + tl.arange(0, R)
        if BIAS:
            g += tl.load(g_bias + r, mask=r < N, other=0.0)
            u += tl.load(u_bias + r, mask=r < N, other=0.0)
        tl.store(y + r, (activate(g, KIND) * u).to(y.dtype.element_ty), mask=r < N)
        qg, ug, sg, tg = qg1, ug1, sg1, tg1
        qu, uu, su, tu = qu1, uu1, su1, tu1
