"""Kernels of one row of activations: every byte of a weight is read once, 16 bytes a thread, straight into registers.

A program owns R rows and walks K in tiles of W words. With PDL it fetches its first tile of codes before it waits for
the kernel that makes its activations, and asks the L2 cache for the rest of its rows (AHEAD).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quarrel.triton_backend.dots import FLOATS, codes_tile, tile_products
from quarrel.triton_backend.elementwise import activate
from quarrel.triton_backend.halved import store_halved


@triton.jit
def fetch(p, size):
    """Asks for `size` bytes from p in the L2 cache, once a program; both are multiples of 16. sm_90 and above."""
    tl.inline_asm_elementwise(
        "{ .reg .pred f; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 f, t, 0;"
        " @f cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, t; }",
        "=r,l,r", [p.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _fetch_rows(FORMAT: tl.constexpr, codes, bits, scale, first, K: tl.constexpr, R: tl.constexpr, N):
    # Whole rows lie together in each plane. The last program's rows may be past the end: nothing to fetch then.
    if first + R <= N:
        row = first.to(tl.int64)
        if FORMAT == "F16" or FORMAT == "BF16":
            fetch(codes + row * K, R * K * 2)
        elif FORMAT == "Q8_0":
            fetch(codes + row * (K // 4), R * K)
            if R * K // 16 % 16 == 0:
                fetch(scale + row * (K // 32), R * K // 16)
        else:
            fetch(codes + row * (K // 8), R * K // 2)
            if FORMAT == "Q6_K":
                fetch(bits + row * (K // 32), R * K // 4)
            if FORMAT == "Q5_K":
                fetch(bits + row * (K // 32), R * K // 8)
            if FORMAT != "MXFP4" and R * K // 16 % 16 == 0:
                fetch(scale + row * (K // 32), R * K // 16)


@triton.jit
def row_sums(
    FORMAT: tl.constexpr, codes, bits, scale, top, x, first, N, K: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products of rows first.. [R] with x; waits for x itself."""
    FLOAT: tl.constexpr = FORMAT == "F16" or FORMAT == "BF16"
    KW: tl.constexpr = K if FLOAT else (K // 4 if FORMAT == "Q8_0" else K // 8)
    C: tl.constexpr = W if FLOAT else W // 4
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    q = codes_tile(FORMAT, codes, n, 0, K, W)
    if PDL:
        if AHEAD:
            _fetch_rows(FORMAT, codes, bits, scale, first, K, R, N)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([R, C], tl.float32)
    for start in tl.range(0, KW - W, W, num_stages=1):
        later = codes_tile(FORMAT, codes, n, start + W, K, W)
        acc += tile_products(FORMAT, q, bits, scale, top, x, n, first, N, start, K, R, W, ASM)
        q = later
    LAST: tl.constexpr = (KW + W - 1) // W * W - W
    acc += tile_products(FORMAT, q, bits, scale, top, x, n, first, N, LAST, K, R, W, ASM)
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
    PDL: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * R
    sums = row_sums(FORMAT, codes, bits, scale, top, xa, first, N, K, R, W, PDL, AHEAD, ASM)
    finish(y, sums, bias, residual, first, N, alpha, BIAS, ADD, R)


@triton.jit
def matvec3(
    y0, y1, y2, x0, x1, x2, c0, b0, s0, t0, c1, b1, s1, t1, c2, b2, s2, t2, bias0, bias1, bias2, N0, N1, N2,
    K: tl.constexpr, F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Three maps of one row: the programs of the first come first."""
    tile = tl.program_id(0)
    t_1 = tl.cdiv(N0, R)
    t_2 = t_1 + tl.cdiv(N1, R)
    if tile < t_1:
        first = tile * R
        sums = row_sums(F0, c0, b0, s0, t0, x0, first, N0, K, R, W0, PDL, AHEAD, ASM)
        finish(y0, sums, bias0, y0, first, N0, 1.0, BIAS, False, R)
    elif tile < t_2:
        first = (tile - t_1) * R
        sums = row_sums(F1, c1, b1, s1, t1, x1, first, N1, K, R, W1, PDL, AHEAD, ASM)
        finish(y1, sums, bias1, y1, first, N1, 1.0, BIAS, False, R)
    else:
        first = (tile - t_2) * R
        sums = row_sums(F2, c2, b2, s2, t2, x2, first, N2, K, R, W2, PDL, AHEAD, ASM)
        finish(y2, sums, bias2, y2, first, N2, 1.0, BIAS, False, R)


@triton.jit
def gate_up(
    y, to, xa, gc, gb, gs, gt, uc, ub, us, ut, g_bias, u_bias, N,
    K: tl.constexpr, F: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, HALVED: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """act(gate x) * up x, rows first..; F is N again, as a constant. HALVED needs whole blocks: R % 32 == N % 32 == 0."""
    first = tl.program_id(0) * R
    FLOAT: tl.constexpr = FORMAT == "F16" or FORMAT == "BF16"
    KW: tl.constexpr = K if FLOAT else (K // 4 if FORMAT == "Q8_0" else K // 8)
    C: tl.constexpr = W if FLOAT else W // 4
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    qg = codes_tile(FORMAT, gc, n, 0, K, W)
    qu = codes_tile(FORMAT, uc, n, 0, K, W)
    if PDL:
        if AHEAD:
            _fetch_rows(FORMAT, gc, gb, gs, first, K, R, N)
            _fetch_rows(FORMAT, uc, ub, us, first, K, R, N)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.zeros([R, C], tl.float32)
    up = tl.zeros([R, C], tl.float32)
    for start in tl.range(0, KW - W, W, num_stages=1):
        next_g = codes_tile(FORMAT, gc, n, start + W, K, W)
        next_u = codes_tile(FORMAT, uc, n, start + W, K, W)
        gate += tile_products(FORMAT, qg, gb, gs, gt, xa, n, first, N, start, K, R, W, ASM)
        up += tile_products(FORMAT, qu, ub, us, ut, xa, n, first, N, start, K, R, W, ASM)
        qg, qu = next_g, next_u
    LAST: tl.constexpr = (KW + W - 1) // W * W - W
    gate += tile_products(FORMAT, qg, gb, gs, gt, xa, n, first, N, LAST, K, R, W, ASM)
    up += tile_products(FORMAT, qu, ub, us, ut, xa, n, first, N, LAST, K, R, W, ASM)
    g, u = tl.sum(gate, 1), tl.sum(up, 1)
    r = first + tl.arange(0, R)
    if BIAS:
        g += tl.load(g_bias + r, mask=r < N, other=0.0)
        u += tl.load(u_bias + r, mask=r < N, other=0.0)
    v = activate(g, KIND) * u
    if PLAIN:
        tl.store(y + r, v.to(y.dtype.element_ty), mask=r < N)
    if HALVED:
        block = first // 32 + tl.arange(0, R // 32)
        store_halved(to, tl.reshape(v, (R // 32, 2, 16)), block, block < F // 32, F)


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
    return codes, codes, scale, codes
