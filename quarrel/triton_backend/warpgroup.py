"""Linear maps of 33 to 128 rows by `wgmma` (capability 9): weights decoded in the registers that it reads, x by copies.

A program owns BM outputs of one matrix, or of gate and up together, for all rows of x; a warp has 16 of them, so what a
lane copies (16 bytes, a block of 32 columns) is its own operand once `warpgroup_x.py` has put columns of x in that order.
Codes and x are copied a step of 128 columns ahead, each by the thread that decodes it, scales loaded two ahead through the
loop, where they cannot sink to their use; half a step is decoded while a group of products runs, and the next group is
queued before that one is waited for. Parts of K meet in float32 scratch, where the last program to arrive adds them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quarrel.triton_backend.rows import finish
from quarrel.triton_backend.warpgroup_codes import SLOTS, copy_in, scales, send, taken, values

# Names of Triton 3.9, or of 3.6.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
STAGES = gl.constexpr(3)
"""Steps of x in shared memory: one is multiplied, one may still be, one comes."""


@gluon.jit
def _bring(xs, x, step, stage, BT: gl.constexpr, WARPS: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    token = gl.arange(0, BT, gl.SliceLayout(1, L))
    column = gl.arange(0, 64, gl.SliceLayout(0, L))
    p = x + step * (BT * 128) + token[:, None] * 64 + column[None, :]
    copy_in(xs.index(stage * 2), p)
    copy_in(xs.index(stage * 2 + 1), p + BT * 64)


@gluon.jit
def _walk(
    FORMAT: gl.constexpr, GATED: gl.constexpr, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, x, xs, cs,
    ds, first, N, begin, end, K: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, MMA: gl.constexpr, WARPS: gl.constexpr,
    WAIT: gl.constexpr,
):  # fmt: skip
    """Sums `[BM, BT]` over steps begin to end. `cs` and `ds` are room for codes of gate and of up."""
    acc = gl.zeros([BM, BT], gl.float32, layout=MMA)
    acc_b = acc
    last = end - 1
    now = gl.minimum(begin, last)
    after = gl.minimum(begin + 1, last)
    send(FORMAT, cs, a_codes, first, N, now, 0, K, BM)
    a, b, s, t = scales(FORMAT, a_bits, a_scale, a_top, first, N, now, K, BM)
    a1, b1, s1, t1 = scales(FORMAT, a_bits, a_scale, a_top, first, N, after, K, BM)
    if GATED:
        acc_b = gl.zeros([BM, BT], gl.float32, layout=MMA)
        send(FORMAT, ds, b_codes, first, N, now, 0, K, BM)
        c, d, u, v = scales(FORMAT, b_bits, b_scale, b_top, first, N, now, K, BM)
        c1, d1, u1, v1 = scales(FORMAT, b_bits, b_scale, b_top, first, N, after, K, BM)
    if WAIT:  # weights are there since the model was loaded, x comes from the kernel before
        gdc_wait()
    _bring(xs, x, now, 0, BT, WARPS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    q0, q1, qa, qb = taken(FORMAT, cs, 0, BM)
    if GATED:
        r0, r1, ra, rb = taken(FORMAT, ds, 0, BM)
    w = values(FORMAT, 0, q0, qa, a, b, s, t, BM, MMA)
    stage = begin * 0
    slot = begin * 0
    for step in range(begin, end):
        after = gl.minimum(step + 1, last)
        to = gl.where(stage == STAGES - 1, 0, stage + 1)
        # Products of the step before may be under way; those of the one before that, whose room this takes, are not.
        _bring(xs, x, after, to, BT, WARPS)
        send(FORMAT, cs, a_codes, first, N, after, 1 - slot, K, BM)
        if GATED:
            send(FORMAT, ds, b_codes, first, N, after, 1 - slot, K, BM)
        async_copy.commit_group()
        far = gl.minimum(step + 2, last)
        x0 = xs.index(stage * 2).permute((1, 0))
        x1 = xs.index(stage * 2 + 1).permute((1, 0))
        a2, b2, s2, t2 = scales(FORMAT, a_bits, a_scale, a_top, first, N, far, K, BM)
        if GATED:
            c2, d2, u2, v2 = scales(FORMAT, b_bits, b_scale, b_top, first, N, far, K, BM)
            sums = warpgroup_mma(w, x0, acc, is_async=True)
            acc, acc_b = warpgroup_mma_wait(1, deps=[sums, acc_b])
            w = values(FORMAT, 0, r0, ra, c, d, u, v, BM, MMA)
            sums = warpgroup_mma(w, x0, acc_b, is_async=True)
            acc, acc_b = warpgroup_mma_wait(1, deps=[acc, sums])
            w = values(FORMAT, 1, q1, qb, a, b, s, t, BM, MMA)
            sums = warpgroup_mma(w, x1, acc, is_async=True)
            acc, acc_b = warpgroup_mma_wait(1, deps=[sums, acc_b])
            w = values(FORMAT, 1, r1, rb, c, d, u, v, BM, MMA)
            sums = warpgroup_mma(w, x1, acc_b, is_async=True)
            acc, acc_b = warpgroup_mma_wait(1, deps=[acc, sums])
            c, d, u, v = c1, d1, u1, v1
            c1, d1, u1, v1 = c2, d2, u2, v2
        else:
            sums = warpgroup_mma(w, x0, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[sums])
            w = values(FORMAT, 1, q1, qb, a, b, s, t, BM, MMA)
            sums = warpgroup_mma(w, x1, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[sums])
        async_copy.wait_group(0)
        fence_async_shared()
        slot = 1 - slot
        q0, q1, qa, qb = taken(FORMAT, cs, slot, BM)
        if GATED:
            r0, r1, ra, rb = taken(FORMAT, ds, slot, BM)
        w = values(FORMAT, 0, q0, qa, a1, b1, s1, t1, BM, MMA)
        a, b, s, t = a1, b1, s1, t1
        a1, b1, s1, t1 = a2, b2, s2, t2
        stage = to
    if GATED:
        acc, acc_b = warpgroup_mma_wait(0, deps=[acc, acc_b])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, acc_b


@gluon.jit
def _added(p_part, stride, PARTS: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, MMA: gl.constexpr):
    # A loop, for all at once outgrow the registers: 4096 x 14336 took 59.3 us instead of 48.8 (H200, 128 rows of x).
    acc = gl.zeros([BM, BT], gl.float32, layout=MMA)
    for i in range(PARTS):
        acc += gl.load(p_part + i * stride, cache_modifier=".cg")
    return acc


@gluon.jit
def _end(
    y, acc, acc_b, bias, bias_b, residual, part, arrived, first, tokens, alpha, N, tile, tiles, BIAS: gl.constexpr,
    ADD: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Adds the parts of K, in order, in the last program of a tile to arrive; then `finish`."""
    out = gl.arange(0, BM, gl.SliceLayout(1, MMA))
    token = gl.arange(0, BT, gl.SliceLayout(0, MMA))
    if PARTS > 1:
        inside = out[:, None] * BT + token[None, :]
        stride = tiles * (BM * BT)
        p_part = part + tile * (BM * BT) + inside
        mine = gl.program_id(1)
        gl.store(p_part + mine * stride, acc)
        if GATED:
            gl.store(p_part + (PARTS + mine) * stride, acc_b)
        _barrier()
        if gl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1:
            gl.store(arrived + tile, 0)
            acc = _added(p_part, stride, PARTS, BM, BT, MMA)
            if GATED:
                acc_b = _added(p_part + PARTS * stride, stride, PARTS, BM, BT, MMA)
            finish(y, acc, acc_b, bias, bias_b, residual, first, tokens, alpha, N, BIAS, ADD, GATED, KIND, BM, BT, MMA)
    else:
        finish(y, acc, acc_b, bias, bias_b, residual, first, tokens, alpha, N, BIAS, ADD, GATED, KIND, BM, BT, MMA)


@gluon.jit(do_not_specialize=["tokens"])
def warpgroup_one(
    y, x, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, bias, bias_b, residual, part, arrived, tokens,
    alpha, N, K: gl.constexpr, FORMAT: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, GATED: gl.constexpr,
    KIND: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (N / BM, PARTS)."""
    WARPS: gl.constexpr = BM // 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BT, 16])
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if PDL:
        gdc_launch_dependents()
    xs = gl.allocate_shared_memory(gl.float16, [STAGES * 2, BT, 64], X)
    C: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PLANES: gl.constexpr = 2 if FORMAT == "Q8_0" else 1
    cs = gl.allocate_shared_memory(gl.int32, [SLOTS * PLANES, BM, 4, 4], C)
    ds = cs
    if GATED:
        ds = gl.allocate_shared_memory(gl.int32, [SLOTS * PLANES, BM, 4, 4], C)
    STEPS: gl.constexpr = K // 128
    EACH: gl.constexpr = (STEPS + PARTS - 1) // PARTS
    begin = gl.program_id(1) * EACH
    tile = gl.program_id(0)
    first = tile * BM
    acc, acc_b = _walk(
        FORMAT, GATED, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, x, xs, cs, ds, first, N, begin,
        gl.minimum(begin + EACH, STEPS), K, BM, BT, MMA, WARPS, PDL,
    )  # fmt: skip
    _end(
        y, acc, acc_b, bias, bias_b, residual, part, arrived, first, tokens, alpha, N, tile, gl.num_programs(0), BIAS, ADD,
        GATED, KIND, PARTS, BM, BT, MMA,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens"])
def warpgroup_three(
    y0, y1, y2, x, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, c_codes, c_bits, c_scale, c_top,
    bias0, bias1, bias2, part, arrived, tokens, N0, N1, N2, K: gl.constexpr, FORMAT0: gl.constexpr,
    FORMAT1: gl.constexpr, FORMAT2: gl.constexpr, BIAS: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr,
    BT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Three maps of one x: the programs of the first come first."""
    WARPS: gl.constexpr = BM // 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BT, 16])
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if PDL:
        gdc_launch_dependents()
    xs = gl.allocate_shared_memory(gl.float16, [STAGES * 2, BT, 64], X)
    C: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PLANES: gl.constexpr = 2 if (FORMAT0 == "Q8_0" or FORMAT1 == "Q8_0" or FORMAT2 == "Q8_0") else 1
    cs = gl.allocate_shared_memory(gl.int32, [SLOTS * PLANES, BM, 4, 4], C)
    STEPS: gl.constexpr = K // 128
    EACH: gl.constexpr = (STEPS + PARTS - 1) // PARTS
    begin = gl.program_id(1) * EACH
    end = gl.minimum(begin + EACH, STEPS)
    tile = gl.program_id(0)
    tiles = gl.num_programs(0)
    tiles0 = gl.cdiv(N0, BM)
    tiles1 = gl.cdiv(N1, BM)
    if tile < tiles0:
        first = tile * BM
        acc, _ = _walk(
            FORMAT0, False, a_codes, a_bits, a_scale, a_top, a_codes, a_bits, a_scale, a_top, x, xs, cs, cs, first, N0,
            begin, end, K, BM, BT, MMA, WARPS, PDL,
        )  # fmt: skip
        _end(
            y0, acc, acc, bias0, bias0, y0, part, arrived, first, tokens, 1.0, N0, tile, tiles, BIAS, False, False,
            "none", PARTS, BM, BT, MMA,
        )  # fmt: skip
    elif tile < tiles0 + tiles1:
        first = (tile - tiles0) * BM
        acc, _ = _walk(
            FORMAT1, False, b_codes, b_bits, b_scale, b_top, b_codes, b_bits, b_scale, b_top, x, xs, cs, cs, first, N1,
            begin, end, K, BM, BT, MMA, WARPS, PDL,
        )  # fmt: skip
        _end(
            y1, acc, acc, bias1, bias1, y1, part, arrived, first, tokens, 1.0, N1, tile, tiles, BIAS, False, False,
            "none", PARTS, BM, BT, MMA,
        )  # fmt: skip
    else:
        first = (tile - tiles0 - tiles1) * BM
        acc, _ = _walk(
            FORMAT2, False, c_codes, c_bits, c_scale, c_top, c_codes, c_bits, c_scale, c_top, x, xs, cs, cs, first, N2,
            begin, end, K, BM, BT, MMA, WARPS, PDL,
        )  # fmt: skip
        _end(
            y2, acc, acc, bias2, bias2, y2, part, arrived, first, tokens, 1.0, N2, tile, tiles, BIAS, False, False,
            "none", PARTS, BM, BT, MMA,
        )  # fmt: skip
