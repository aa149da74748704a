"""Kernels of one row of activations: every byte of a weight is read once, 16 bytes a thread, straight into registers.

A program owns R rows and walks K in tiles of W words, of which it loads one ahead, or two (DEEP). With PDL it starts before
the kernel that makes its activations is over, and waits for that one only when its first tiles are on their way. Asking the
L2 cache for whole rows at that point made a step of Mistral-7B slower (H200, 1.92 ms for 1.69).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quarrel.triton_backend.dots import FLOATS, load_tile, tile_products
from quarrel.triton_backend.elementwise import activate


@triton.jit
def row_sums(
    FORMAT: tl.constexpr, codes, bits, scale, top, x, first, N, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr, DEEP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products of rows first.. [R] with x; waits for x itself."""
    FLOAT: tl.constexpr = FORMAT == "F16" or FORMAT == "BF16"
    KW: tl.constexpr = K if FLOAT else (K // 4 if FORMAT == "Q8_0" else K // 8)
    C: tl.constexpr = W if FLOAT else W // 4
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    q, u, s, t = load_tile(FORMAT, codes, bits, scale, top, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    TILES: tl.constexpr = (KW + W - 1) // W
    acc = tl.zeros([R, C], tl.float32)
    if DEEP and TILES > 1:
        # Two tiles ahead.
        q1, u1, s1, t1 = load_tile(FORMAT, codes, bits, scale, top, n, first, N, W, K, R, W, ASM)
        if PDL:
            tl.extra.cuda.gdc_wait()
        for start in tl.range(0, (TILES - 2) * W, W, num_stages=1):
            q2, u2, s2, t2 = load_tile(FORMAT, codes, bits, scale, top, n, first, N, start + 2 * W, K, R, W, ASM)
            acc += tile_products(FORMAT, q, u, s, t, x, start, K, R, W, ASM)
            q, u, s, t = q1, u1, s1, t1
            q1, u1, s1, t1 = q2, u2, s2, t2
        acc += tile_products(FORMAT, q, u, s, t, x, (TILES - 2) * W, K, R, W, ASM)
        q, u, s, t = q1, u1, s1, t1
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        for start in tl.range(0, (TILES - 1) * W, W, num_stages=1):
            q1, u1, s1, t1 = load_tile(FORMAT, codes, bits, scale, top, n, first, N, start + W, K, R, W, ASM)
            acc += tile_products(FORMAT, q, u, s, t, x, start, K, R, W, ASM)
            q, u, s, t = q1, u1, s1, t1
    acc += tile_products(FORMAT, q, u, s, t, x, (TILES - 1) * W, K, R, W, ASM)
    return tl.sum(acc, 1)


@triton.jit
def finish(y, sums, bias, residual, first, N, alpha, BIAS: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr):
    n = first + tl.arange(0, R)
    if BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0)
    if ADD:
        sums = tl.load(residual + n, mask=n < N, other=0.0) + alpha * sums
    tl.store(y + n, sums.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def matvec(
    y, xa, codes, bits, scale, top, bias, residual, alpha, N,
    K: tl.constexpr, FORMAT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr, DEEP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * R
    sums = row_sums(FORMAT, codes, bits, scale, top, xa, first, N, K, R, W, PDL, DEEP, ASM)
    finish(y, sums, bias, residual, first, N, alpha, BIAS, ADD, R)


@triton.jit
def matvec3(
    y0, y1, y2, x0, x1, x2, c0, b0, s0, t0, c1, b1, s1, t1, c2, b2, s2, t2, bias0, bias1, bias2, N0, N1, N2,
    K: tl.constexpr, F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, PDL: tl.constexpr, DEEP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Three maps of one row: the programs of the first come first."""
    tile = tl.program_id(0)
    t_1 = tl.cdiv(N0, R)
    t_2 = t_1 + tl.cdiv(N1, R)
    if tile < t_1:
        first = tile * R
        sums = row_sums(F0, c0, b0, s0, t0, x0, first, N0, K, R, W0, PDL, DEEP, ASM)
        finish(y0, sums, bias0, y0, first, N0, 1.0, BIAS, False, R)
    elif tile < t_2:
        first = (tile - t_1) * R
        sums = row_sums(F1, c1, b1, s1, t1, x1, first, N1, K, R, W1, PDL, DEEP, ASM)
        finish(y1, sums, bias1, y1, first, N1, 1.0, BIAS, False, R)
    else:
        first = (tile - t_2) * R
        sums = row_sums(F2, c2, b2, s2, t2, x2, first, N2, K, R, W2, PDL, DEEP, ASM)
        finish(y2, sums, bias2, y2, first, N2, 1.0, BIAS, False, R)


@triton.jit
def gate_up(
    y, xa, gc, gb, gs, gt, uc, ub, us, ut, g_bias, u_bias, N,
    K: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """act(gate x) * up x, rows first.."""
    first = tl.program_id(0) * R
    FLOAT: tl.constexpr = FORMAT == "F16" or FORMAT == "BF16"
    KW: tl.constexpr = K if FLOAT else (K // 4 if FORMAT == "Q8_0" else K // 8)
    C: tl.constexpr = W if FLOAT else W // 4
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    qg, ug, sg, tg = load_tile(FORMAT, gc, gb, gs, gt, n, first, N, 0, K, R, W, ASM)
    qu, uu, su, tu = load_tile(FORMAT, uc, ub, us, ut, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    TILES: tl.constexpr = (KW + W - 1) // W
    gate = tl.zeros([R, C], tl.float32)
    up = tl.zeros([R, C], tl.float32)
    for start in tl.range(0, (TILES - 1) * W, W, num_stages=1):
        qg1, ug1, sg1, tg1 = load_tile(FORMAT, gc, gb, gs, gt, n, first, N, start + W, K, R, W, ASM)
        qu1, uu1, su1, tu1 = load_tile(FORMAT, uc, ub, us, ut, n, first, N, start + W, K, R, W, ASM)
        gate += tile_products(FORMAT, qg, ug, sg, tg, xa, start, K, R, W, ASM)
        up += tile_products(FORMAT, qu, uu, su, tu, xa, start, K, R, W, ASM)
        qg, ug, sg, tg = qg1, ug1, sg1, tg1
        qu, uu, su, tu = qu1, uu1, su1, tu1
    gate += tile_products(FORMAT, qg, ug, sg, tg, xa, (TILES - 1) * W, K, R, W, ASM)
    up += tile_products(FORMAT, qu, uu, su, tu, xa, (TILES - 1) * W, K, R, W, ASM)
    g, u = tl.sum(gate, 1), tl.sum(up, 1)
    r = first + tl.arange(0, R)
    if BIAS:
        g += tl.load(g_bias + r, mask=r < N, other=0.0)
        u += tl.load(u_bias + r, mask=r < N, other=0.0)
    tl.store(y + r, (activate(g, KIND) * u).to(y.dtype.element_ty), mask=r < N)


def wide(format: str, planes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The planes of a weight in the words that these kernels load."""
    codes, bits, scale, top = planes
    if format in FLOATS:
        return codes, codes, codes, codes
    codes = codes.view(torch.int32)
    if format == "Q6_K":
        return codes, bits.view(torch.int64), scale.view(torch.int16), top
    if format in ("Q4_K", "Q5_K"):
        return codes, bits if format == "Q5_K" else codes, scale.view(torch.int16), top.view(torch.int32)
    if format == "IQ4_XS":
        return codes, codes, scale, top
    two = format in ("Q4_1", "Q5_1")
    return codes, bits if format in ("Q5_0", "Q5_1") else codes, scale.view(torch.int32) if two else scale, codes
