"""Linear maps of 33 to 128 rows by `wgmma` (capability 9): weights decoded in the registers that it reads, x by copies.

A program owns BM outputs of one matrix for all rows of x; a warp has 16 of them, so what a lane copies (16 bytes, a block
of 32 columns) is its own operand once `wgmma_x.py` has put columns of x in that order. Codes and x are copied a step of 128
columns ahead, each by the thread that decodes it, scales loaded two ahead through the loop, where they cannot sink to their
use; half a step is decoded while a group of products runs, and the next group is queued before that one is waited for.
Parts of K meet in float32 scratch, where the last program to arrive adds them.
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

from quarrel.triton_backend.formats.wgmma_codes import SLOTS, copy_in, planes_of, receive, scales, send, values
from quarrel.triton_backend.linear.matmul import Epilogue
from quarrel.triton_backend.linear.mma import finish

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
    FORMAT: gl.constexpr, w, x, xs, cs, first, N, begin, end, K: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr,
    MMA: gl.constexpr, WARPS: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    """Sums `[BM, BT]` over steps begin to end. `cs` is shared memory for codes."""
    acc = gl.zeros([BM, BT], gl.float32, layout=MMA)
    last = end - 1
    now = gl.minimum(begin, last)
    after = gl.minimum(begin + 1, last)
    send(FORMAT, cs, w.codes, first, N, now, 0, K, BM)
    a, b, s, t = scales(FORMAT, w, first, N, now, K, BM)
    a1, b1, s1, t1 = scales(FORMAT, w, first, N, after, K, BM)
    if WAIT:  # weights are there since the model was loaded, x comes from the kernel before
        gdc_wait()
    _bring(xs, x, now, 0, BT, WARPS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    q0, q1, qa, qb = receive(FORMAT, cs, 0, BM)
    v = values(FORMAT, 0, q0, qa, a, b, s, t, BM, MMA)
    stage = begin * 0
    slot = begin * 0
    for step in range(begin, end):
        after = gl.minimum(step + 1, last)
        to = gl.where(stage == STAGES - 1, 0, stage + 1)
        # Products of the step before may be under way; those of the one before that, whose room this takes, are not.
        _bring(xs, x, after, to, BT, WARPS)
        send(FORMAT, cs, w.codes, first, N, after, 1 - slot, K, BM)
        async_copy.commit_group()
        far = gl.minimum(step + 2, last)
        x0 = xs.index(stage * 2).permute((1, 0))
        x1 = xs.index(stage * 2 + 1).permute((1, 0))
        a2, b2, s2, t2 = scales(FORMAT, w, first, N, far, K, BM)
        sums = warpgroup_mma(v, x0, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[sums])
        v = values(FORMAT, 1, q1, qb, a, b, s, t, BM, MMA)
        sums = warpgroup_mma(v, x1, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[sums])
        async_copy.wait_group(0)
        fence_async_shared()
        slot = 1 - slot
        q0, q1, qa, qb = receive(FORMAT, cs, slot, BM)
        v = values(FORMAT, 0, q0, qa, a1, b1, s1, t1, BM, MMA)
        a, b, s, t = a1, b1, s1, t1
        a1, b1, s1, t1 = a2, b2, s2, t2
        stage = to
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _added(p_part, stride, PARTS: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, MMA: gl.constexpr):
    # A loop, for all at once outgrow the registers: 4096 x 14336 took 59.3 us instead of 48.8 (H200, 128 rows of x).
    acc = gl.zeros([BM, BT], gl.float32, layout=MMA)
    for i in range(PARTS):
        acc += gl.load(p_part + i * stride, cache_modifier=".cg")
    return acc


@gluon.jit
def _end(
    y, acc, bias, split, first, tokens, N, BIAS: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Adds the parts of K, in order, in the last program of a tile to arrive; then `finish`."""
    tile, tiles = gl.program_id(0), gl.num_programs(0)
    out = gl.arange(0, BM, gl.SliceLayout(1, MMA))
    token = gl.arange(0, BT, gl.SliceLayout(0, MMA))
    more = Epilogue(bias, bias, y)
    if PARTS > 1:
        inside = out[:, None] * BT + token[None, :]
        stride = tiles * (BM * BT)
        p_part = split.sums + tile * (BM * BT) + inside
        gl.store(p_part + gl.program_id(1) * stride, acc)
        _barrier()
        if gl.atomic_add(split.arrived + tile, 1, sem="acq_rel") == PARTS - 1:
            gl.store(split.arrived + tile, 0)
            acc = _added(p_part, stride, PARTS, BM, BT, MMA)
            finish(y, acc, acc, more, first, tokens, 1.0, N, BIAS, False, False, "none", BM, BT, MMA)
    else:
        finish(y, acc, acc, more, first, tokens, 1.0, N, BIAS, False, False, "none", BM, BT, MMA)


@gluon.jit
def _one_of_three(
    y, x, w, bias, split, xs, cs, first, tokens, N, begin, end, K: gl.constexpr, FORMAT: gl.constexpr,
    BIAS: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, MMA: gl.constexpr, WARPS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    acc = _walk(FORMAT, w, x, xs, cs, first, N, begin, end, K, BM, BT, MMA, WARPS, PDL)
    _end(y, acc, bias, split, first, tokens, N, BIAS, PARTS, BM, BT, MMA)


@gluon.jit(do_not_specialize=["tokens"])
def warpgroup_three(
    ys, x, ws, biases, split, tokens, ns, K: gl.constexpr, FORMATS: gl.constexpr, BIAS: gl.constexpr, PARTS: gl.constexpr,
    BM: gl.constexpr, BT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Three maps of one x, y = w x + bias. Grid (tiles of BM rows of all three, those of the first map first; PARTS).

    ys, ws, biases, ns and FORMATS are tuples of three.

    y       [tokens, N], float32 or the compute type
    x       float16, as `wgmma_x.arrange` puts BT rows of K columns
    w       Planes of weights [N, K]
    split   SplitK: float32 [PARTS * N / BM * BM * BT], and counts [N / BM], N of all three
    """
    # Parts of a constant are constants by annotation only (Triton 3.6).
    F0: gl.constexpr = FORMATS[0]
    F1: gl.constexpr = FORMATS[1]
    F2: gl.constexpr = FORMATS[2]
    WARPS: gl.constexpr = BM // 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BT, 16])
    X: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if PDL:
        gdc_launch_dependents()
    xs = gl.allocate_shared_memory(gl.float16, [STAGES * 2, BT, 64], X)
    C: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PLANES: gl.constexpr = planes_of(F0, F1, F2)
    cs = gl.allocate_shared_memory(gl.int32, [SLOTS * PLANES, BM, 4, 4], C)
    STEPS: gl.constexpr = K // 128
    EACH: gl.constexpr = (STEPS + PARTS - 1) // PARTS
    begin = gl.program_id(1) * EACH
    end = gl.minimum(begin + EACH, STEPS)
    tile = gl.program_id(0)
    tiles0 = gl.cdiv(ns[0], BM)
    tiles1 = gl.cdiv(ns[1], BM)
    if tile < tiles0:
        _one_of_three(
            ys[0], x, ws[0], biases[0], split, xs, cs, tile * BM, tokens, ns[0], begin, end, K, F0, BIAS, PARTS,
            BM, BT, MMA, WARPS, PDL,
        )  # fmt: skip
    elif tile < tiles0 + tiles1:
        _one_of_three(
            ys[1], x, ws[1], biases[1], split, xs, cs, (tile - tiles0) * BM, tokens, ns[1], begin, end, K, F1,
            BIAS, PARTS, BM, BT, MMA, WARPS, PDL,
        )  # fmt: skip
    else:
        _one_of_three(
            ys[2], x, ws[2], biases[2], split, xs, cs, (tile - tiles0 - tiles1) * BM, tokens, ns[2], begin, end, K,
            F2, BIAS, PARTS, BM, BT, MMA, WARPS, PDL,
        )  # fmt: skip
