"""Products of many rows with stacks of experts in 16 bits or E4M3: rows gathered by expert, tiles of one expert by TMA.

y[pair] = activation(x W^T + bias). `gather_rows` copies each pair's row of x behind those of the same expert and lists the
experts; programs of `grouped_products` are persistent and take tiles in turn, those of one expert one after the other, its
rows of x innermost: what is read of a stack at a time stays in L2. Gate and up lie row by row in one stack, so the two
values of a result stand side by side in a tile and the activation needs no exchange.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.elementwise.activation import activate, oai
from quarrel.triton_backend.formats.e4m3 import scale_of, to_e4m3


@triton.jit(do_not_specialize=["pairs", "first_expert", "experts"])
def gather_rows(
    rows, scale, places, x, order, starts, pairs, K, first_expert, experts, PADDED: tl.constexpr,
    PER_TOKEN: tl.constexpr, EIGHT: tl.constexpr, BT: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rows `[pairs, K]`: row order[i] / PER_TOKEN of x `[tokens, K]`, in the type of rows.

    With EIGHT rows are in E4M3, each with a float32 scale, and C columns are all of them.

    order `[pairs]` and starts int32 are those of `group_pairs`. places int32, for `experts` of them from the first on: how
    many tiles of BT rows there are, three unused, and for each tile its expert counted from the first, that expert's first
    row, their end, and its first tile. Grid (pairs + 1, K / C): the last programs list the tiles.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    if i < pairs:
        column = tl.program_id(1) * C + tl.arange(0, C)
        row = (tl.load(order + i) // PER_TOKEN).to(tl.int64)
        v = tl.load(x + row * K + column, mask=column < K, other=0.0)
        if EIGHT:
            s = scale_of(tl.max(tl.abs(v.to(tl.float32)), 0))
            tl.store(scale + i, s)
            v = to_e4m3(v.to(tl.float32), s)
        tl.store(rows + i.to(tl.int64) * K + column, v.to(rows.dtype.element_ty), mask=column < K)
    elif tl.program_id(1) == 0:
        expert = tl.arange(0, PADDED)
        ok = expert < experts
        first = tl.load(starts + first_expert + expert, mask=ok, other=0)
        end = tl.load(starts + first_expert + expert + 1, mask=ok, other=0)
        tiles = (end - first + BT - 1) // BT
        base = tl.cumsum(tiles, 0) - tiles
        tl.store(places, tl.sum(tiles, 0))
        for j in range(tl.max(tiles, 0)):
            p = places + 4 + (base + j) * 4
            more = j < tiles
            tl.store(p, expert, mask=more)
            tl.store(p + 1, first, mask=more)
            tl.store(p + 2, end, mask=more)
            tl.store(p + 3, base, mask=more)


@triton.jit
def _put(
    y, acc, scale, bias, up_bias, expert, pair, ok, column, N, GATED: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, EIGHT: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Stores `activation(acc)`, columns from `column` on; of gate and up in turn, half as many."""
    if EIGHT:
        width = N * 2 if GATED else N
        near = column + tl.arange(0, BN)
        acc *= tl.load(scale + expert * width + near, mask=near < width, other=0.0)[None, :]
    if GATED:
        out = column // 2 + tl.arange(0, BN // 2)
        gate, up = tl.split(tl.reshape(acc, [BT, BN // 2, 2]))
        if BIAS:
            gate += tl.load(bias + expert * N + out, mask=out < N, other=0.0)[None, :]
            up += tl.load(up_bias + expert * N + out, mask=out < N, other=0.0)[None, :]
        v = oai(gate, up) if KIND == "oai" else activate(gate, KIND) * up
    else:
        out = column + tl.arange(0, BN)
        v = acc
        if BIAS:
            v += tl.load(bias + expert * N + out, mask=out < N, other=0.0)[None, :]
        if KIND != "none":
            v = activate(v, KIND)
    at = pair.to(tl.int64)[:, None] * N + out[None, :]
    tl.store(y + at, v.to(y.dtype.element_ty), mask=ok[:, None] & (out < N)[None, :])


@triton.jit(do_not_specialize=["steps"])
def grouped_products(
    y, x, w, x_scale, w_scale, bias, up_bias, places, order, N, steps, GATED: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, EIGHT: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y `[pairs, N]` = activation(x W^T + bias), rows of y by `order`. Grid: any number of programs.

    x: a descriptor of rows by expert, `[pairs, K]`, boxes of `[BT, BK]`
    w: a descriptor of the stack, `[experts * N, K]`, of gate and up `[experts * N * 2, K]` with their rows in turn; boxes
       of `[BN, BK]`; both in 16 bits, or with EIGHT in E4M3, whose rows have float32 scales x_scale and w_scale
    bias, up_bias: float32 `[experts, N]`, read with BIAS
    places: as `gather_rows` lists them, for the same BT; steps: K / BK
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    width = N * 2 if GATED else N
    columns = tl.cdiv(width, BN)
    total = tl.load(places) * columns
    # Flattened, the next tile's copies start while this one's results are stored.
    for unit in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        p = places + 4 + unit // columns * 4
        expert = tl.load(p)
        begin = tl.load(p + 1)
        end = tl.load(p + 2)
        base = tl.load(p + 3)
        tiles = (end - begin + BT - 1) // BT
        within = unit - base * columns
        first = begin + within % tiles * BT
        column = within // tiles * BN
        row = expert * width + column
        acc = tl.zeros([BT, BN], tl.float32)
        for step in range(steps):
            acc = tl.dot(x.load([first, step * BK]), w.load([row, step * BK]).T, acc)
        lane = first + tl.arange(0, BT)
        ok = lane < end
        pair = tl.load(order + lane, mask=ok, other=0)
        if EIGHT:
            acc *= tl.load(x_scale + lane, mask=ok, other=0.0)[:, None]
        # Half at a time, so that less of a tile passes through shared memory at once.
        left, right = tl.split(tl.permute(tl.reshape(acc, [BT, 2, BN // 2]), (0, 2, 1)))
        _put(
            y, left, w_scale, bias, up_bias, expert, pair, ok, column, N, GATED, KIND, BIAS, EIGHT, BT, BN // 2
        )  # fmt: skip
        _put(
            y, right, w_scale, bias, up_bias, expert, pair, ok, column + BN // 2, N, GATED, KIND, BIAS, EIGHT, BT, BN // 2
        )  # fmt: skip
