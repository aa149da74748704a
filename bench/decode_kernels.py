"""Kernels of `decode_rows.py` that the backend does not use: rows walked by maps other than gate and up."""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.dots import load_tile, products
from quarrel.triton_backend.stream import row_here


@triton.jit
def _walk(
    FORMAT: tl.constexpr, y, codes, bits, scale, top, row, q, u, s, t, residual, alpha, first, step, N, K: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, ADD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    for at in tl.range(first, N, step, num_stages=1):
        n = tl.minimum(at + step + tl.arange(0, R), N - 1).to(tl.int64)
        q1, u1, s1, t1 = load_tile(FORMAT, codes, bits, scale, top, n, at + step, N, 0, K, R, W, ASM)
        sums = tl.sum(products(FORMAT, q, u, s, t, row, R, W, ASM), 1)
        r = at + tl.arange(0, R)
        if ADD:
            sums = tl.load(residual + r, mask=r < N, other=0.0) + alpha * sums
        tl.store(y + r, sums.to(y.dtype.element_ty), mask=r < N)
        q, u, s, t = q1, u1, s1, t1


@triton.jit
def stream(
    y, x, gain, eps, codes, bits, scale, top, residual, alpha, N, K: tl.constexpr, FORMAT: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, R: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * R
    step = tl.num_programs(0) * R
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    q, u, s, t = load_tile(FORMAT, codes, bits, scale, top, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = row_here(FORMAT, x, gain, eps, K, W, NORM, PDL, ASM)
    _walk(FORMAT, y, codes, bits, scale, top, row, q, u, s, t, residual, alpha, first, step, N, K, R, W, ADD, ASM)


@triton.jit
def stream3(
    y0, y1, y2, x, gain, eps, c0, b0, s0, t0, c1, b1, s1, t1, c2, b2, s2, t2, N0, N1, N2, P0, P1,
    K: tl.constexpr, F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, NORM: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Three maps: P0 programs walk the first, then P1 the second."""
    program = tl.program_id(0)
    if program < P0:
        _one_of(F0, y0, x, gain, eps, c0, b0, s0, t0, program, P0, N0, K, NORM, R, W, PDL, ASM)
    elif program < P0 + P1:
        _one_of(F1, y1, x, gain, eps, c1, b1, s1, t1, program - P0, P1, N1, K, NORM, R, W, PDL, ASM)
    else:
        before = P0 + P1
        _one_of(
            F2, y2, x, gain, eps, c2, b2, s2, t2, program - before, tl.num_programs(0) - before, N2, K, NORM, R, W, PDL, ASM
        )


@triton.jit
def _one_of(
    FORMAT: tl.constexpr, y, x, gain, eps, codes, bits, scale, top, program, programs, N, K: tl.constexpr,
    NORM: tl.constexpr, R: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    first, step = program * R, programs * R
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    q, u, s, t = load_tile(FORMAT, codes, bits, scale, top, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = row_here(FORMAT, x, gain, eps, K, W, NORM, PDL, ASM)
    _walk(FORMAT, y, codes, bits, scale, top, row, q, u, s, t, y, 1.0, first, step, N, K, R, W, False, ASM)
