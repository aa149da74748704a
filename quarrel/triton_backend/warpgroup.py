"""Linear maps of 33 to 128 rows by `wgmma` (capability 9): weights decoded in the registers that it reads, x by copies.

A program owns BM outputs of one matrix, or of gate and up together, for all rows of x; a warp has 16 of them, so what a
lane loads (16 bytes, a block of 32 columns) is its own operand once `warpgroup_x.py` has put columns of x in that order.
Half a step of 128 columns is decoded while the product before it runs. Parts of K meet in float32 scratch, where the last
program to arrive adds them in order.
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

from quarrel.triton_backend import elementwise
from quarrel.triton_backend.fragments import (
    EIGHT,
    EIGHT_OUT,
    EIGHT_OUT_5,
    FIVE,
    FOUR,
    HALVES,
    SIX,
    float16_of,
    twice,
)

# Names of Triton 3.9, or of 3.6.
_copy_in = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_activate = gluon.jit(elementwise.activate.fn)


@gluon.constexpr_function
def _layout(bm, words):
    """`[bm, 4, words]`: lanes of four blocks by eight rows, a warp sixteen rows."""
    regs = [[0, 0, 1 << i] for i in range(words.bit_length() - 1)] + [[8, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16 << i, 0, 0] for i in range((bm // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [bm, 4, words])


@gluon.jit
def _words(p, at, BM: gl.constexpr, PER: gl.constexpr):
    """Four words of each block `[BM, 4]`: two of the first half of a step, two of the second, `[BM, 4, 2]` each."""
    L4: gl.constexpr = _layout(BM, 4)
    L2: gl.constexpr = _layout(BM, 2)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L4)))
    q = gl.load(p + at[:, :, None] * PER + word[None, None, :])
    first, second = gl.split(gl.permute(gl.reshape(q, [BM, 4, 2, 2]), (0, 1, 3, 2)))
    return gl.convert_layout(first, L2, assert_trivial=True), gl.convert_layout(second, L2, assert_trivial=True)


@gluon.jit
def _fetch(FORMAT: gl.constexpr, codes, bits, scale, top, first, N, step, K: gl.constexpr, BM: gl.constexpr):
    """Codes of both halves of a step `[BM, 4, 2]`, what goes with them, scales and the super-block's `[BM, 4]`."""
    WIDE: gl.constexpr = gl.SliceLayout(2, _layout(BM, 4))
    FLAT: gl.constexpr = gl.SliceLayout(2, _layout(BM, 2))
    row = gl.minimum(first + gl.arange(0, BM, gl.SliceLayout(1, WIDE)), N - 1).to(gl.int64)
    block = step * 4 + gl.arange(0, 4, gl.SliceLayout(0, WIDE))
    at = (row * (K // 32))[:, None] + block[None, :]
    p = codes.to(gl.pointer_type(gl.int32))
    q0, q1 = _words(p, at, BM, 8 if FORMAT == "Q8_0" else 4)
    a, b = q0, q1
    if FORMAT == "Q8_0":  # columns 16 to 31 of a block
        a, b = _words(p + 4, at, BM, 8)
    row = gl.minimum(first + gl.arange(0, BM, gl.SliceLayout(1, FLAT)), N - 1).to(gl.int64)
    block = step * 4 + gl.arange(0, 4, gl.SliceLayout(0, FLAT))
    at = (row * (K // 32))[:, None] + block[None, :]
    up = (row * (K // 256))[:, None] + (block // 8)[None, :]
    if FORMAT == "Q8_0" or FORMAT == "Q4_0":
        s = gl.load(scale + at)
        t = s
    else:
        s = gl.load(scale.to(gl.pointer_type(gl.int16)) + at)
        if FORMAT == "Q6_K":
            a, b = gl.load(bits + at * 2), gl.load(bits + at * 2 + 1)
            t = gl.load(top.to(gl.pointer_type(gl.int16)) + up).to(gl.int32)
        else:
            t = gl.load(top.to(gl.pointer_type(gl.int32)) + up)
            if FORMAT == "Q5_K":
                a = gl.load(bits + at)
    return q0, q1, a, b, s, t


@gluon.jit
def _values(FORMAT: gl.constexpr, HALF: gl.constexpr, q, a, b, s, t, BM: gl.constexpr, MMA: gl.constexpr):
    """Half a step of a weight, `[BM, 64]` float16, as `wgmma` reads it from registers."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    L2: gl.constexpr = _layout(BM, 2)
    word = (HALF * 2 + gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L2))))[None, None, :]
    if FORMAT == "Q8_0" or FORMAT == "Q4_0":
        d = twice(s.to(gl.float32))[:, :, None].broadcast_to([BM, 4, 2])
        if FORMAT == "Q8_0":
            upper = b if HALF else a
            o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
                EIGHT, EIGHT_OUT, [q, upper, d], dtype=HALVES, is_pure=True, pack=1
            )
        else:
            o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
                FOUR, EIGHT_OUT, [q, d, d * 0], dtype=HALVES, is_pure=True, pack=1
            )
    elif FORMAT == "Q6_K":
        both, d = s.to(gl.int32), float16_of(t)
        s_low = twice(((both << 24) >> 24).to(gl.float32) * d)[:, :, None].broadcast_to([BM, 4, 2])
        s_high = twice((both >> 8).to(gl.float32) * d)[:, :, None].broadcast_to([BM, 4, 2])
        u_low, u_high = (a[:, :, None] >> (word * 8)) & 255, (b[:, :, None] >> (word * 8)) & 255
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            SIX, EIGHT_OUT_5, [q, s_low, s_high, u_low, u_high], dtype=HALVES, is_pure=True, pack=1
        )
    else:
        MIDDLE: gl.constexpr = 8.0 if FORMAT == "Q4_K" else 16.0
        both = s.to(gl.int32)
        d = (both & 255).to(gl.float32) * float16_of(t)
        m = MIDDLE * d - ((both >> 8) & 255).to(gl.float32) * float16_of(t >> 16)
        d = twice(d)[:, :, None].broadcast_to([BM, 4, 2])
        m = twice(m)[:, :, None].broadcast_to([BM, 4, 2])
        if FORMAT == "Q4_K":
            o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
                FOUR, EIGHT_OUT, [q, d, m], dtype=HALVES, is_pure=True, pack=1
            )
        else:
            u_low, u_high = (a[:, :, None] >> (word * 4)) & 15, (a[:, :, None] >> (word * 4 + 16)) & 15
            o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
                FIVE, EIGHT_OUT_5, [q, d, m, u_low, u_high], dtype=HALVES, is_pure=True, pack=1
            )
    low = gl.join(gl.join(o0, o1), gl.join(o2, o3))  # [BM, block, word, one, next]
    high = gl.join(gl.join(o4, o5), gl.join(o6, o7))
    both_ways = gl.permute(gl.join(low, high), (0, 2, 5, 4, 1, 3))  # [BM, word, upper, next, block, one]
    return gl.convert_layout(gl.reshape(both_ways, [BM, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def _copy(xs, x, step, stage, BT: gl.constexpr, WARPS: gl.constexpr):
    """Both halves of a step of x, on their way to shared memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    token = gl.arange(0, BT, gl.SliceLayout(1, L))
    column = gl.arange(0, 64, gl.SliceLayout(0, L))
    p = x + step * (BT * 128) + token[:, None] * 64 + column[None, :]
    _copy_in(xs.index(stage * 2), p)
    _copy_in(xs.index(stage * 2 + 1), p + BT * 64)
    async_copy.commit_group()


@gluon.jit
def _walk(
    FORMAT: gl.constexpr, GATED: gl.constexpr, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, x, xs,
    first, N, begin, end, K: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr,
    WARPS: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """Sums `[BM, BT]` over steps begin to end."""
    acc = gl.zeros([BM, BT], gl.float32, layout=MMA)
    acc_b = acc
    last = end - 1
    # A part may have nothing to do.
    q0, q1, a, b, s, t = _fetch(FORMAT, a_codes, a_bits, a_scale, a_top, first, N, gl.minimum(begin, last), K, BM)
    if GATED:
        acc_b = gl.zeros([BM, BT], gl.float32, layout=MMA)
        r0, r1, c, d, u, v = _fetch(FORMAT, b_codes, b_bits, b_scale, b_top, first, N, gl.minimum(begin, last), K, BM)
    if WAIT:  # weights are there since the model was loaded, x comes from the kernel before
        gdc_wait()
    for i in gl.static_range(STAGES - 1):
        _copy(xs, x, gl.minimum(begin + i, last), i, BT, WARPS)
    w = _values(FORMAT, 0, q0, a, b, s, t, BM, MMA)
    stage = begin * 0
    for step in range(begin, end):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        # Every warp is past the products of the step before, whose room this takes.
        to = stage + (STAGES - 1)
        to = gl.where(to >= STAGES, to - STAGES, to)
        _copy(xs, x, gl.minimum(step + STAGES - 1, last), to, BT, WARPS)
        after = gl.minimum(step + 1, last)
        x0 = xs.index(stage * 2).permute((1, 0))
        x1 = xs.index(stage * 2 + 1).permute((1, 0))
        if GATED:
            sums = warpgroup_mma(w, x0, acc, is_async=True)
            n0, n1, na, nb, ns, nt = _fetch(FORMAT, a_codes, a_bits, a_scale, a_top, first, N, after, K, BM)
            m0, m1, nc, nd, nu, nv = _fetch(FORMAT, b_codes, b_bits, b_scale, b_top, first, N, after, K, BM)
            w = _values(FORMAT, 0, r0, c, d, u, v, BM, MMA)
            acc = warpgroup_mma_wait(0, deps=[sums])
            sums = warpgroup_mma(w, x0, acc_b, is_async=True)
            w = _values(FORMAT, 1, q1, a, b, s, t, BM, MMA)
            acc_b = warpgroup_mma_wait(0, deps=[sums])
            sums = warpgroup_mma(w, x1, acc, is_async=True)
            w = _values(FORMAT, 1, r1, c, d, u, v, BM, MMA)
            acc = warpgroup_mma_wait(0, deps=[sums])
            sums = warpgroup_mma(w, x1, acc_b, is_async=True)
            w = _values(FORMAT, 0, n0, na, nb, ns, nt, BM, MMA)
            acc_b = warpgroup_mma_wait(0, deps=[sums])
            r0, r1, c, d, u, v = m0, m1, nc, nd, nu, nv
        else:
            sums = warpgroup_mma(w, x0, acc, is_async=True)
            n0, n1, na, nb, ns, nt = _fetch(FORMAT, a_codes, a_bits, a_scale, a_top, first, N, after, K, BM)
            w = _values(FORMAT, 1, q1, a, b, s, t, BM, MMA)
            acc = warpgroup_mma_wait(0, deps=[sums])
            sums = warpgroup_mma(w, x1, acc, is_async=True)
            w = _values(FORMAT, 0, n0, na, nb, ns, nt, BM, MMA)
            acc = warpgroup_mma_wait(0, deps=[sums])
        q0, q1, a, b, s, t = n0, n1, na, nb, ns, nt
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    async_copy.wait_group(0)
    return acc, acc_b


@gluon.jit
def _end(
    y, acc, acc_b, bias, bias_b, residual, part, arrived, first, tokens, alpha, N, tile, tiles, BIAS: gl.constexpr,
    ADD: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Adds the parts of K, in order, in the last program of a tile to arrive; then `_store`."""
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
            acc = gl.zeros([BM, BT], gl.float32, layout=MMA)
            for i in gl.static_range(PARTS):
                acc += gl.load(p_part + i * stride, cache_modifier=".cg")
            if GATED:
                acc_b = gl.zeros([BM, BT], gl.float32, layout=MMA)
                for i in gl.static_range(PARTS):
                    acc_b += gl.load(p_part + (PARTS + i) * stride, cache_modifier=".cg")
            gl.store(arrived + tile, 0)
            _store(y, acc, acc_b, bias, bias_b, residual, first, tokens, alpha, N, BIAS, ADD, GATED, KIND, BM, BT, MMA)
    else:
        _store(y, acc, acc_b, bias, bias_b, residual, first, tokens, alpha, N, BIAS, ADD, GATED, KIND, BM, BT, MMA)


@gluon.jit
def _store(
    y, acc, acc_b, bias, bias_b, residual, first, tokens, alpha, N, BIAS: gl.constexpr, ADD: gl.constexpr,
    GATED: gl.constexpr, KIND: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Bias, activation or residual, and the store."""
    row = first + gl.arange(0, BM, gl.SliceLayout(1, MMA))
    token = gl.arange(0, BT, gl.SliceLayout(0, MMA))
    at = token[None, :] * N + row[:, None]
    row_ok = row < N
    ok = row_ok[:, None] & (token < tokens)[None, :]
    if BIAS:
        acc += gl.load(bias + row, mask=row_ok, other=0.0)[:, None]
        if GATED:
            acc_b += gl.load(bias_b + row, mask=row_ok, other=0.0)[:, None]
    if GATED:
        acc = _activate(acc, KIND) * acc_b
    if ADD:
        acc = gl.load(residual + at, mask=ok, other=0.0).to(gl.float32) + alpha * acc
    gl.store(y + at, acc.to(y.dtype.element_ty), mask=ok)


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
    STEPS: gl.constexpr = K // 128
    EACH: gl.constexpr = (STEPS + PARTS - 1) // PARTS
    begin = gl.program_id(1) * EACH
    tile = gl.program_id(0)
    first = tile * BM
    acc, acc_b = _walk(
        FORMAT, GATED, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, x, xs, first, N, begin,
        gl.minimum(begin + EACH, STEPS), K, BM, BT, STAGES, MMA, WARPS, PDL,
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
            FORMAT0, False, a_codes, a_bits, a_scale, a_top, a_codes, a_bits, a_scale, a_top, x, xs, first, N0, begin, end,
            K, BM, BT, STAGES, MMA, WARPS, PDL,
        )  # fmt: skip
        _end(
            y0, acc, acc, bias0, bias0, y0, part, arrived, first, tokens, 1.0, N0, tile, tiles, BIAS, False, False,
            "none", PARTS, BM, BT, MMA,
        )  # fmt: skip
    elif tile < tiles0 + tiles1:
        first = (tile - tiles0) * BM
        acc, _ = _walk(
            FORMAT1, False, b_codes, b_bits, b_scale, b_top, b_codes, b_bits, b_scale, b_top, x, xs, first, N1, begin, end,
            K, BM, BT, STAGES, MMA, WARPS, PDL,
        )  # fmt: skip
        _end(
            y1, acc, acc, bias1, bias1, y1, part, arrived, first, tokens, 1.0, N1, tile, tiles, BIAS, False, False,
            "none", PARTS, BM, BT, MMA,
        )  # fmt: skip
    else:
        first = (tile - tiles0 - tiles1) * BM
        acc, _ = _walk(
            FORMAT2, False, c_codes, c_bits, c_scale, c_top, c_codes, c_bits, c_scale, c_top, x, xs, first, N2, begin, end,
            K, BM, BT, STAGES, MMA, WARPS, PDL,
        )  # fmt: skip
        _end(
            y2, acc, acc, bias2, bias2, y2, part, arrived, first, tokens, 1.0, N2, tile, tiles, BIAS, False, False,
            "none", PARTS, BM, BT, MMA,
        )  # fmt: skip
