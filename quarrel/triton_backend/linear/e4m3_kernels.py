"""Products of many rows in E4M3: rows of x and of the weights by TMA, sums in float32, scaled when they are stored.

    y[t, n] = (sum_k x8[t, k] w8[n, k]) * sx[t] * sw[n]

Programs are persistent and take tiles in turn, rows of x innermost. Up to three weights lie one behind the other, each with
a result of its own; gate and up lie row by row in turn, so both values of a result stand side by side in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.elementwise.activation import activate


@triton.jit
def _store(
    y, acc, scale, residual, bias, alpha, row, ok, column, N, GATED: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Results of rows `row`, columns from `column` on of N; of gate and up in turn, half as many."""
    near = column + tl.arange(0, BN)
    acc *= tl.load(scale + near, mask=near < N, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + near, mask=near < N, other=0.0)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BT, BN // 2, 2]))
        v = activate(gate, KIND) * up
        out = column // 2 + tl.arange(0, BN // 2)
        width = N // 2
    else:
        v = acc
        out = column + tl.arange(0, BN)
        width = N
    at = row.to(tl.int64)[:, None] * width + out[None, :]
    ok = ok[:, None] & (out < width)[None, :]
    if ADD:
        v = tl.load(residual + at, mask=ok, other=0.0).to(tl.float32) + alpha * v
    tl.store(y + at, v.to(y.dtype.element_ty), mask=ok)


@triton.jit
def _store_parts(
    y, acc, scale, residual, bias, alpha, row, ok, column, N, GATED: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`_store`; float32 results, half of the columns after the other."""
    if ADD:
        left, right = tl.split(tl.permute(tl.reshape(acc, [BT, 2, BN // 2]), (0, 2, 1)))
        _store(y, left, scale, residual, bias, alpha, row, ok, column, N, GATED, KIND, BIAS, ADD, BT, BN // 2)
        near = column + BN // 2
        _store(y, right, scale, residual, bias, alpha, row, ok, near, N, GATED, KIND, BIAS, ADD, BT, BN // 2)
    else:
        _store(y, acc, scale, residual, bias, alpha, row, ok, column, N, GATED, KIND, BIAS, ADD, BT, BN)


@triton.jit(do_not_specialize=["tokens", "steps", "alpha"])
def e4m3_products(
    first_y, second_y, third_y, x, w, x_scale, w_scale, bias, residual, tokens, first_n, second_n, third_n, steps, alpha,
    GATED: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, MAPS: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each y `[tokens, n]` = x W^T + bias, residual + alpha * that, or activation(gate x) * up x. Grid: any number.

    x: a descriptor of rows `[tokens, K]` in E4M3, boxes of `[BT, BK]`; w: of all rows of the weights, boxes of `[BN, BK]`
    x_scale `[tokens]`, w_scale and bias (read with BIAS) for each row of the weights: float32
    first_n: rows of the first weight, of gate and up both; with MAPS 3 each n is a multiple of BN; steps: K / BK
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tiles = tl.cdiv(tokens, BT)
    rows = first_n
    if MAPS == 3:
        rows += second_n + third_n
    # Flattened, the next tile's copies start while this one's results are stored.
    for unit in tl.range(tl.program_id(0), tiles * tl.cdiv(rows, BN), tl.num_programs(0), flatten=True):
        first = unit % tiles * BT
        begin = unit // tiles * BN
        acc = tl.zeros([BT, BN], tl.float32)
        for step in range(steps):
            acc = tl.dot(x.load([first, step * BK]), w.load([begin, step * BK]).T, acc)
        row = first + tl.arange(0, BT)
        ok = row < tokens
        acc *= tl.load(x_scale + row, mask=ok, other=0.0)[:, None]
        y = first_y
        n = first_n
        base = begin * 0
        if MAPS == 3:
            second = begin >= first_n
            third = begin >= first_n + second_n
            y = tl.where(third, third_y, tl.where(second, second_y, first_y))
            n = tl.where(third, third_n, tl.where(second, second_n, first_n))
            base = tl.where(third, first_n + second_n, tl.where(second, first_n, 0))
        # A part at a time, so that less of a tile passes through shared memory and registers at once.
        left, right = tl.split(tl.permute(tl.reshape(acc, [BT, 2, BN // 2]), (0, 2, 1)))
        s = w_scale + base
        b = bias + base
        near = begin - base
        _store_parts(y, left, s, residual, b, alpha, row, ok, near, n, GATED, KIND, BIAS, ADD, BT, BN // 2)
        near += BN // 2
        _store_parts(y, right, s, residual, b, alpha, row, ok, near, n, GATED, KIND, BIAS, ADD, BT, BN // 2)
