"""Gate and up of one row over floats: the norm before it inside, and the row in registers while a program walks many rows.

A tile is a whole row of W (so K is at most W), so that a thread has the same columns of every row: activations are read and
normalised once a program, and the next rows are on their way while these are summed. Programs take rows in turns, R at a
time; how many programs there are changes no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.dots import load_tile, products
from quarrel.triton_backend.elementwise import activate


@triton.jit
def stream_gate_up(
    y, x, gain, eps, gate, up, g_bias, u_bias, N, K: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, R: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """act(gate norm(x)) * up norm(x); x is float32."""
    first = tl.program_id(0) * R
    step = tl.num_programs(0) * R
    n = tl.minimum(first + tl.arange(0, R), N - 1).to(tl.int64)
    b_gate, _, _, _ = load_tile(FORMAT, gate, gate, gate, gate, n, first, N, 0, K, R, W, ASM)
    b_up, _, _, _ = load_tile(FORMAT, up, up, up, up, n, first, N, 0, K, R, W, ASM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.arange(0, W)
    weight = tl.load(gain + w, mask=w < K, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + w, mask=w < K, other=0.0).to(tl.float32)
    v = v * (1.0 / tl.sqrt(tl.sum(v * v, 0) / K + eps)) * weight
    row = (v[None, :],)
    for at in tl.range(first, N, step, num_stages=1):
        n = tl.minimum(at + step + tl.arange(0, R), N - 1).to(tl.int64)
        next_gate, _, _, _ = load_tile(FORMAT, gate, gate, gate, gate, n, at + step, N, 0, K, R, W, ASM)
        next_up, _, _, _ = load_tile(FORMAT, up, up, up, up, n, at + step, N, 0, K, R, W, ASM)
        g = tl.sum(products(FORMAT, b_gate, 0, 0, 0, row, R, W, ASM), 1)
        u = tl.sum(products(FORMAT, b_up, 0, 0, 0, row, R, W, ASM), 1)
        r = at + tl.arange(0, R)
        if BIAS:
            g += tl.load(g_bias + r, mask=r < N, other=0.0)
            u += tl.load(u_bias + r, mask=r < N, other=0.0)
        tl.store(y + r, (activate(g, KIND) * u).to(y.dtype.element_ty), mask=r < N)
        b_gate, b_up = next_gate, next_up
