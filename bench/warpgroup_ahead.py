"""A trial of `warpgroup.py`: codes of weights by asynchronous copies too, scales two steps ahead, products queued.

In the assembly of those in the package the loads of the next codes stand right before their decoding, a trip to memory in
every step, and half of a decoding stands between the first product of a group and its others. Here codes come to shared
memory like x, each thread its own 16 bytes; what it loads itself goes through a step of the loop, so that it cannot sink;
and one group of products is always under way, whatever stands before the next.
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

from quarrel.triton_backend.warpgroup import _copy_in, _end, _layout, _values

SLOTS = gl.constexpr(2)
"""Of codes; x has STAGES, three."""


@gluon.jit
def _send(FORMAT: gl.constexpr, to, codes, first, N, step, slot, K: gl.constexpr, BM: gl.constexpr):
    """Codes of a step, on their way to shared memory."""
    L4: gl.constexpr = _layout(BM, 4)
    WIDE: gl.constexpr = gl.SliceLayout(2, L4)
    PER: gl.constexpr = 8 if FORMAT == "Q8_0" else 4
    row = gl.minimum(first + gl.arange(0, BM, gl.SliceLayout(1, WIDE)), N - 1).to(gl.int64)
    block = step * 4 + gl.arange(0, 4, gl.SliceLayout(0, WIDE))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L4)))
    at = (row * (K // 32))[:, None] + block[None, :]
    p = codes.to(gl.pointer_type(gl.int32)) + at[:, :, None] * PER + word[None, None, :]
    if FORMAT == "Q8_0":
        _copy_in(to.index(slot * 2), p)
        _copy_in(to.index(slot * 2 + 1), p + 4)
    else:
        _copy_in(to.index(slot), p)


@gluon.jit
def _both(held, BM: gl.constexpr):
    """Words of a block: two of the first half of a step, two of the second."""
    q = held.load(_layout(BM, 4))
    L2: gl.constexpr = _layout(BM, 2)
    first, second = gl.split(gl.permute(gl.reshape(q, [BM, 4, 2, 2]), (0, 1, 3, 2)))
    return gl.convert_layout(first, L2, assert_trivial=True), gl.convert_layout(second, L2, assert_trivial=True)


@gluon.jit
def _taken(FORMAT: gl.constexpr, held, slot, BM: gl.constexpr):
    if FORMAT == "Q8_0":
        q0, q1 = _both(held.index(slot * 2), BM)
        a, b = _both(held.index(slot * 2 + 1), BM)
    else:
        q0, q1 = _both(held.index(slot), BM)
        a, b = q0, q1
    return q0, q1, a, b


@gluon.jit
def _scales(FORMAT: gl.constexpr, bits, scale, top, first, N, step, K: gl.constexpr, BM: gl.constexpr):
    """Upper bits, scales and the super-block's of a step, `[BM, 4]`."""
    FLAT: gl.constexpr = gl.SliceLayout(2, _layout(BM, 2))
    row = gl.minimum(first + gl.arange(0, BM, gl.SliceLayout(1, FLAT)), N - 1).to(gl.int64)
    block = step * 4 + gl.arange(0, 4, gl.SliceLayout(0, FLAT))
    at = (row * (K // 32))[:, None] + block[None, :]
    up = (row * (K // 256))[:, None] + (block // 8)[None, :]
    if FORMAT == "Q8_0" or FORMAT == "Q4_0":
        s = gl.load(scale + at)
        a, b, t = s, s, s
    else:
        s = gl.load(scale.to(gl.pointer_type(gl.int16)) + at)
        if FORMAT == "Q6_K":
            a, b = gl.load(bits + at * 2), gl.load(bits + at * 2 + 1)
            t = gl.load(top.to(gl.pointer_type(gl.int16)) + up)
        else:
            t = gl.load(top.to(gl.pointer_type(gl.int32)) + up)
            a = t
            if FORMAT == "Q5_K":
                a = gl.load(bits + at)
            b = a
    return a, b, s, t


@gluon.jit
def _half(
    FORMAT: gl.constexpr, HALF: gl.constexpr, q, upper, second, a, b, s, t, BM: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    if FORMAT == "Q8_0":
        return _values(FORMAT, HALF, q, upper, second, s, t, BM, MMA)
    else:
        return _values(FORMAT, HALF, q, a, b, s, t.to(gl.int32), BM, MMA)


@gluon.jit
def _bring(xs, x, step, stage, BT: gl.constexpr, WARPS: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    token = gl.arange(0, BT, gl.SliceLayout(1, L))
    column = gl.arange(0, 64, gl.SliceLayout(0, L))
    p = x + step * (BT * 128) + token[:, None] * 64 + column[None, :]
    _copy_in(xs.index(stage * 2), p)
    _copy_in(xs.index(stage * 2 + 1), p + BT * 64)


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
    _send(FORMAT, cs, a_codes, first, N, now, 0, K, BM)
    a, b, s, t = _scales(FORMAT, a_bits, a_scale, a_top, first, N, now, K, BM)
    a1, b1, s1, t1 = _scales(FORMAT, a_bits, a_scale, a_top, first, N, after, K, BM)
    if GATED:
        acc_b = gl.zeros([BM, BT], gl.float32, layout=MMA)
        _send(FORMAT, ds, b_codes, first, N, now, 0, K, BM)
        c, d, u, v = _scales(FORMAT, b_bits, b_scale, b_top, first, N, now, K, BM)
        c1, d1, u1, v1 = _scales(FORMAT, b_bits, b_scale, b_top, first, N, after, K, BM)
    if WAIT:  # weights are there since the model was loaded, x comes from the kernel before
        gdc_wait()
    _bring(xs, x, now, 0, BT, WARPS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    q0, q1, qa, qb = _taken(FORMAT, cs, 0, BM)
    if GATED:
        r0, r1, ra, rb = _taken(FORMAT, ds, 0, BM)
    w = _half(FORMAT, 0, q0, qa, qb, a, b, s, t, BM, MMA)
    stage = begin * 0
    slot = begin * 0
    for step in range(begin, end):
        after = gl.minimum(step + 1, last)
        to = gl.where(stage == 2, 0, stage + 1)
        # Products of the step before may be under way; those of the one before that, whose room this takes, are not.
        _bring(xs, x, after, to, BT, WARPS)
        _send(FORMAT, cs, a_codes, first, N, after, 1 - slot, K, BM)
        if GATED:
            _send(FORMAT, ds, b_codes, first, N, after, 1 - slot, K, BM)
        async_copy.commit_group()
        far = gl.minimum(step + 2, last)
        x0 = xs.index(stage * 2).permute((1, 0))
        x1 = xs.index(stage * 2 + 1).permute((1, 0))
        a2, b2, s2, t2 = _scales(FORMAT, a_bits, a_scale, a_top, first, N, far, K, BM)
        if GATED:
            c2, d2, u2, v2 = _scales(FORMAT, b_bits, b_scale, b_top, first, N, far, K, BM)
            sums = warpgroup_mma(w, x0, acc, is_async=True)
            acc, acc_b = warpgroup_mma_wait(1, deps=[sums, acc_b])
            w = _half(FORMAT, 0, r0, ra, rb, c, d, u, v, BM, MMA)
            sums = warpgroup_mma(w, x0, acc_b, is_async=True)
            acc, acc_b = warpgroup_mma_wait(1, deps=[acc, sums])
            w = _half(FORMAT, 1, q1, qa, qb, a, b, s, t, BM, MMA)
            sums = warpgroup_mma(w, x1, acc, is_async=True)
            acc, acc_b = warpgroup_mma_wait(1, deps=[sums, acc_b])
            w = _half(FORMAT, 1, r1, ra, rb, c, d, u, v, BM, MMA)
            sums = warpgroup_mma(w, x1, acc_b, is_async=True)
            acc, acc_b = warpgroup_mma_wait(1, deps=[acc, sums])
            c, d, u, v = c1, d1, u1, v1
            c1, d1, u1, v1 = c2, d2, u2, v2
        else:
            sums = warpgroup_mma(w, x0, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[sums])
            w = _half(FORMAT, 1, q1, qa, qb, a, b, s, t, BM, MMA)
            sums = warpgroup_mma(w, x1, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[sums])
        async_copy.wait_group(0)
        fence_async_shared()
        slot = 1 - slot
        q0, q1, qa, qb = _taken(FORMAT, cs, slot, BM)
        if GATED:
            r0, r1, ra, rb = _taken(FORMAT, ds, slot, BM)
        w = _half(FORMAT, 0, q0, qa, qb, a1, b1, s1, t1, BM, MMA)
        a, b, s, t = a1, b1, s1, t1
        a1, b1, s1, t1 = a2, b2, s2, t2
        stage = to
    if GATED:
        acc, acc_b = warpgroup_mma_wait(0, deps=[acc, acc_b])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, acc_b


@gluon.jit(do_not_specialize=["tokens"])
def warpgroup_one(
    y, x, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, bias, bias_b, residual, part, arrived, tokens,
    alpha, N, K: gl.constexpr, FORMAT: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, GATED: gl.constexpr,
    KIND: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
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
    BT: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
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
