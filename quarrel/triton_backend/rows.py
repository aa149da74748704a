"""Linear maps of 2 to 16 rows of activations: weights from memory to registers to the matrix units, each read once.

A program owns `BM` outputs; its warps take 256 columns of K each, turn by turn, and add their sums at the end, always in
the same order. The next codes are on their way while these are decoded. How K is dealt out follows from the weight's shape;
the number of rows only says how many of them `mma` is given.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from quarrel.triton_backend.fragments import fetch_words, pairs, words_layout


@gluon.jit
def _walk(
    FORMAT: gl.constexpr, GATED: gl.constexpr, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, x, first,
    tokens, N, K: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Sums `[BM, BT]` of matrix A, and of B if GATED, for outputs from `first` on."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 16)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 16)
    L4: gl.constexpr = words_layout(W, BM)
    L3: gl.constexpr = gl.SliceLayout(3, L4)
    STEPS: gl.constexpr = (K + 256 * W - 1) // (256 * W)
    WHOLE: gl.constexpr = K % (256 * W) == 0
    super = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, L3)))[:, None]
    row = first + gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    row = gl.minimum(row, N - 1).to(gl.int64)[None, :]
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :]
    # Columns in the weights' order: sixteen of a block.
    k = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, B)))
    token = gl.arange(0, BT, gl.SliceLayout(0, gl.SliceLayout(1, B)))
    turn = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, B)))
    column = gl.expand_dims(gl.expand_dims(turn, 1) * 256, 2) + gl.expand_dims(gl.expand_dims(k // 16 * 32 + k % 16, 0), 2)
    token = gl.expand_dims(gl.expand_dims(token, 0), 1)
    p_x = x + token * K + column
    acc = gl.zeros([W, BM, BT], gl.float32, layout=MMA)
    acc_b = gl.zeros([W, BM, BT], gl.float32, layout=MMA)
    q, a, b, s, t = fetch_words(
        FORMAT, a_codes, a_bits, a_scale, a_top, row, gl.minimum(super * 8, K // 32 - 8)[:, :, None] + within,
        gl.minimum(super, K // 256 - 1), K, L4,
    )  # fmt: skip
    if GATED:
        q_b, a_b, b_b, s_b, t_b = fetch_words(
            FORMAT, b_codes, b_bits, b_scale, b_top, row, gl.minimum(super * 8, K // 32 - 8)[:, :, None] + within,
            gl.minimum(super, K // 256 - 1), K, L4,
        )  # fmt: skip
    for step in range(STEPS):
        x_ok = (token < tokens) & (column < K - step * (256 * W)) if not WHOLE else (token < tokens) & (column >= 0)
        x_low = gl.load(p_x + step * (256 * W), mask=x_ok, other=0.0)
        x_high = gl.load(p_x + step * (256 * W) + 16, mask=x_ok, other=0.0)
        after = gl.minimum((step + 1) * W + super, K // 256 - 1)
        q1, a1, b1, s1, t1 = fetch_words(
            FORMAT, a_codes, a_bits, a_scale, a_top, row, (after * 8)[:, :, None] + within, after, K, L4
        )
        if GATED:
            q2, a2, b2, s2, t2 = fetch_words(
                FORMAT, b_codes, b_bits, b_scale, b_top, row, (after * 8)[:, :, None] + within, after, K, L4
            )
        low, high = pairs(FORMAT, q, a, b, s, t, W, BM, L4, A)
        acc = mma_v2(low, x_low, acc)
        acc = mma_v2(high, x_high, acc)
        q, a, b, s, t = q1, a1, b1, s1, t1
        if GATED:
            low, high = pairs(FORMAT, q_b, a_b, b_b, s_b, t_b, W, BM, L4, A)
            acc_b = mma_v2(low, x_low, acc_b)
            acc_b = mma_v2(high, x_high, acc_b)
            q_b, a_b, b_b, s_b, t_b = q2, a2, b2, s2, t2
    return gl.sum(acc, 0), gl.sum(acc_b, 0)


@gluon.jit(do_not_specialize=["tokens"])
def rows_one(
    y, x, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, bias, bias_b, residual, tokens, alpha, N,
    K: gl.constexpr, FORMAT: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
    W: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    first = gl.program_id(0) * BM
    acc, acc_b = _walk(
        FORMAT, GATED, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, x, first, tokens, N, K, W, BM, BT,
        MMA,
    )  # fmt: skip
    row = first + gl.arange(0, BM, gl.SliceLayout(1, gl.SliceLayout(0, MMA)))
    token = gl.arange(0, BT, gl.SliceLayout(0, gl.SliceLayout(0, MMA)))
    _finish(y, acc, acc_b, bias, bias_b, residual, row, token, tokens, alpha, N, BIAS, ADD, GATED, KIND)


@gluon.jit
def _finish(
    y, acc, acc_b, bias, bias_b, residual, row, token, tokens, alpha, N,
    BIAS: gl.constexpr, ADD: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Bias, activation or residual, and the store."""
    row_ok = row < N
    if BIAS:
        acc += gl.load(bias + row, mask=row_ok, other=0.0)[:, None]
        if GATED:
            acc_b += gl.load(bias_b + row, mask=row_ok, other=0.0)[:, None]
    if GATED:
        acc = acc / (1.0 + gl.exp(-acc)) * acc_b
    at = token[None, :] * N + row[:, None]
    ok = row_ok[:, None] & (token < tokens)[None, :]
    if ADD:
        acc = gl.load(residual + at, mask=ok, other=0.0).to(gl.float32) + alpha * acc
    gl.store(y + at, acc.to(y.dtype.element_ty), mask=ok)
