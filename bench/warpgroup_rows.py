"""A trial for 33 to 128 rows: `wgmma` with weights decoded in the registers that it reads, x by asynchronous copies.

A program owns BM outputs of one matrix, or of gate and up together, for all rows of x; a warp has 16 of them, so what a
lane loads (16 bytes, a block of 32 columns) is its own operand once x counts its columns in the same order (`column_at`).
Half a step of 128 columns is decoded while the product before it runs. Not in the package: nothing of it is measured yet
(docs/kernel-log.md); `bench/prep.py` checks and times it, and lends it to whole models by `lent`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quarrel.ops.program import Node
from quarrel.triton_backend import elementwise, norm, rows
from quarrel.triton_backend.fragments import (
    _EIGHT_OUT,
    _EIGHT_OUT_5,
    _FOUR,
    _HALVES,
    _SIX,
    twice,
)
from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.runtime import Live, Site, Slot, cdiv, dims, power_of_two, starts_early

MOST = 128
STEP = 128
"""Columns of a step."""
TAKEN = ("Q4_K", "Q6_K")

# Names of Triton 3.9, or of 3.6.
_copy_in = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_activate = gluon.jit(elementwise.activate.fn)


@triton.jit
def column_at(i):
    """The column, of 128, of place i in the order in which a lane's words become operands."""
    half, low, upper, next, lane, one = i // 64, i // 32 % 2, i // 16 % 2, i // 8 % 2, i // 2 % 4, i % 2
    return lane * 32 + upper * 16 + half * 8 + low * 4 + next * 2 + one


@triton.jit
def place_of(column):
    """The place of a column of 128: the inverse of `column_at`."""
    lane, upper, half, low, next, one = (
        column // 32 % 4,
        column // 16 % 2,
        column // 8 % 2,
        column // 4 % 2,
        column // 2 % 2,
        column % 2,
    )
    return half * 64 + low * 32 + upper * 16 + next * 8 + lane * 2 + one


@triton.jit(do_not_specialize=["tokens"])
def arrange(to, x, tokens, K: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr):
    """Rows of x as float16, `[K / 64, BT, 64]`; those beyond the last are zero. Grid (K / 128, BT / 16)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1) * 16 + tl.arange(0, 16)
    i = tl.arange(0, 128)
    at = row.to(tl.int64)[:, None] * K + (tl.program_id(0) * 128 + column_at(i))[None, :]
    v = tl.load(x + at, mask=(row < tokens)[:, None], other=0.0)
    place = (tl.program_id(0) * 2 + i // 64) * (BT * 64) + i % 64
    tl.store(to + row[:, None] * 64 + place[None, :], v.to(tl.float16))


@triton.jit(do_not_specialize=["tokens"])
def norm_arranged(to, x, gain, tokens, eps, K: tl.constexpr, C: tl.constexpr, BT: tl.constexpr, PDL: tl.constexpr):
    """RMS norm of rows in the order of `arrange`; a program a row, of which those beyond the last are zero."""
    row = tl.program_id(0)
    column = tl.arange(0, C)
    weight = tl.load(gain + column, mask=column < K, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    there = K * tl.minimum(tokens - row, 1)
    value = tl.load(x + row * K + column, mask=column < there, other=0.0).to(tl.float32)
    value = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / K + eps)) * weight
    place = place_of(column % 128)
    at = (column // 128 * 2 + place // 64) * (BT * 64) + row * 64 + place % 64
    tl.store(to + at, value.to(tl.float16), mask=column < K)


@gluon.constexpr_function
def _layout(bm, words):
    """`[bm, 4, words]`: lanes of four blocks by eight rows, a warp sixteen rows."""
    regs = [[0, 0, 1 << i] for i in range(words.bit_length() - 1)] + [[8, 0, 0]]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16 << i, 0, 0] for i in range((bm // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [bm, 4, words])


@gluon.jit
def _fetch(FORMAT: gl.constexpr, codes, bits, scale, top, first, N, step, K: gl.constexpr, BM: gl.constexpr):
    """Codes of both halves of a step `[BM, 4, 2]`, upper bits, scales and the super-block's `[BM, 4]`."""
    L4: gl.constexpr = _layout(BM, 4)
    L2: gl.constexpr = _layout(BM, 2)
    WIDE: gl.constexpr = gl.SliceLayout(2, L4)
    FLAT: gl.constexpr = gl.SliceLayout(2, L2)
    row = gl.minimum(first + gl.arange(0, BM, gl.SliceLayout(1, WIDE)), N - 1).to(gl.int64)
    block = step * 4 + gl.arange(0, 4, gl.SliceLayout(0, WIDE))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L4)))
    at = (row * (K // 32))[:, None] + block[None, :]
    q = gl.load(codes.to(gl.pointer_type(gl.int32)) + at[:, :, None] * 4 + word[None, None, :])
    q0, q1 = gl.split(gl.permute(gl.reshape(q, [BM, 4, 2, 2]), (0, 1, 3, 2)))
    q0 = gl.convert_layout(q0, L2, assert_trivial=True)
    q1 = gl.convert_layout(q1, L2, assert_trivial=True)
    row = gl.minimum(first + gl.arange(0, BM, gl.SliceLayout(1, FLAT)), N - 1).to(gl.int64)
    block = step * 4 + gl.arange(0, 4, gl.SliceLayout(0, FLAT))
    at = (row * (K // 32))[:, None] + block[None, :]
    s = gl.load(scale.to(gl.pointer_type(gl.int16)) + at)
    up = (row * (K // 256))[:, None] + (block // 8)[None, :]
    if FORMAT == "Q6_K":
        a, b = gl.load(bits + at * 2), gl.load(bits + at * 2 + 1)
        t = gl.load(top.to(gl.pointer_type(gl.int16)) + up).to(gl.int32)
    else:
        t = gl.load(top.to(gl.pointer_type(gl.int32)) + up)
        a, b = t, t
    return q0, q1, a, b, s, t


@gluon.jit
def _float16(word):
    return word.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _values(FORMAT: gl.constexpr, HALF: gl.constexpr, q, a, b, s, t, BM: gl.constexpr, MMA: gl.constexpr):
    """Half a step of a weight, `[BM, 64]` float16, as `wgmma` reads it from registers."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    both = s.to(gl.int32)
    d = _float16(t)
    if FORMAT == "Q6_K":
        L2: gl.constexpr = _layout(BM, 2)
        s_low = twice(((both << 24) >> 24).to(gl.float32) * d)[:, :, None].broadcast_to([BM, 4, 2])
        s_high = twice((both >> 8).to(gl.float32) * d)[:, :, None].broadcast_to([BM, 4, 2])
        shift = (HALF * 2 + gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L2))))[None, None, :] * 8
        u_low = (a[:, :, None] >> shift) & 255
        u_high = (b[:, :, None] >> shift) & 255
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            _SIX, _EIGHT_OUT_5, [q, s_low, s_high, u_low, u_high], dtype=_HALVES, is_pure=True, pack=1
        )
    else:
        step = (both & 255).to(gl.float32) * d
        m = 8.0 * step - ((both >> 8) & 255).to(gl.float32) * _float16(t >> 16)
        scale = twice(step)[:, :, None].broadcast_to([BM, 4, 2])
        less = twice(m)[:, :, None].broadcast_to([BM, 4, 2])
        o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
            _FOUR, _EIGHT_OUT, [q, scale, less], dtype=_HALVES, is_pure=True, pack=1
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
    q0, q1, a, b, s, t = _fetch(FORMAT, a_codes, a_bits, a_scale, a_top, first, N, begin, K, BM)
    if GATED:
        acc_b = gl.zeros([BM, BT], gl.float32, layout=MMA)
        r0, r1, c, d, u, v = _fetch(FORMAT, b_codes, b_bits, b_scale, b_top, first, N, begin, K, BM)
    if WAIT:  # weights are there since the model was loaded, x comes from the kernel before
        gdc_wait()
    last = end - 1
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
    y, acc, acc_b, residual, part, arrived, first, tokens, alpha, N, tile, tiles, ADD: gl.constexpr, GATED: gl.constexpr,
    KIND: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Adds the parts of K, in order, in the last program of a tile to arrive; activation or residual, and the store."""
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
            _store(y, acc, acc_b, residual, first, tokens, alpha, N, ADD, GATED, KIND, BM, BT, MMA)
    else:
        _store(y, acc, acc_b, residual, first, tokens, alpha, N, ADD, GATED, KIND, BM, BT, MMA)


@gluon.jit
def _store(
    y, acc, acc_b, residual, first, tokens, alpha, N, ADD: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
    BM: gl.constexpr, BT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    row = first + gl.arange(0, BM, gl.SliceLayout(1, MMA))
    token = gl.arange(0, BT, gl.SliceLayout(0, MMA))
    at = token[None, :] * N + row[:, None]
    ok = (row < N)[:, None] & (token < tokens)[None, :]
    if GATED:
        acc = _activate(acc, KIND) * acc_b
    if ADD:
        acc = gl.load(residual + at, mask=ok, other=0.0).to(gl.float32) + alpha * acc
    gl.store(y + at, acc.to(y.dtype.element_ty), mask=ok)


@gluon.jit(do_not_specialize=["tokens"])
def warpgroup_one(
    y, x, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, residual, part, arrived, tokens, alpha, N,
    K: gl.constexpr, FORMAT: gl.constexpr, ADD: gl.constexpr, GATED: gl.constexpr, KIND: gl.constexpr,
    PARTS: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
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
        y, acc, acc_b, residual, part, arrived, first, tokens, alpha, N, tile, gl.num_programs(0), ADD, GATED, KIND, PARTS,
        BM, BT, MMA,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens"])
def warpgroup_three(
    y0, y1, y2, x, a_codes, a_bits, a_scale, a_top, b_codes, b_bits, b_scale, b_top, c_codes, c_bits, c_scale, c_top,
    part, arrived, tokens, N0, N1, N2, K: gl.constexpr, FORMAT0: gl.constexpr, FORMAT1: gl.constexpr,
    FORMAT2: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
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
        _end(y0, acc, acc, y0, part, arrived, first, tokens, 1.0, N0, tile, tiles, False, False, "none", PARTS, BM, BT, MMA)
    elif tile < tiles0 + tiles1:
        first = (tile - tiles0) * BM
        acc, _ = _walk(
            FORMAT1, False, b_codes, b_bits, b_scale, b_top, b_codes, b_bits, b_scale, b_top, x, xs, first, N1, begin, end,
            K, BM, BT, STAGES, MMA, WARPS, PDL,
        )  # fmt: skip
        _end(y1, acc, acc, y1, part, arrived, first, tokens, 1.0, N1, tile, tiles, False, False, "none", PARTS, BM, BT, MMA)
    else:
        first = (tile - tiles0 - tiles1) * BM
        acc, _ = _walk(
            FORMAT2, False, c_codes, c_bits, c_scale, c_top, c_codes, c_bits, c_scale, c_top, x, xs, first, N2, begin, end,
            K, BM, BT, STAGES, MMA, WARPS, PDL,
        )  # fmt: skip
        _end(y2, acc, acc, y2, part, arrived, first, tokens, 1.0, N2, tile, tiles, False, False, "none", PARTS, BM, BT, MMA)


@dataclass(frozen=True)
class Tile:
    """`rows` of a weight a program (16 a warp), `parts` of K, `stages` of x."""

    rows: int = 128
    parts: int = 1
    stages: int = 4


@dataclass(frozen=True)
class Tiles:
    """For gate and up, three maps of one x, and others by their columns: many (down) or few (the output)."""

    gated: Tile = Tile()
    three: Tile = Tile(parts=2)
    down: Tile = Tile(parts=4)
    out: Tile = Tile(parts=4)
    head: Tile = Tile(stages=3)

    def one(self, n: int, k: int) -> Tile:
        return self.head if n > 16384 else self.down if k > n else self.out


def takes(site: Site, weights: Sequence[Packed]) -> bool:
    """Whether these kernels read the weights."""
    read = all(w.format in TAKEN and w.k % 256 == 0 for w in weights)
    return read and site.compute == "float16" and site.generation == 9 and not site.deterministic


def width_of(count: int) -> int:
    return 64 if count <= 64 else MOST


def run_one(
    launch: Any, tile: Tile, width: int, y: torch.Tensor, x: torch.Tensor, weights: Sequence[Packed], residual: Any,
    part: torch.Tensor, arrived: torch.Tensor, count: int, alpha: float, kind: str,
) -> None:  # fmt: skip
    a, b = weights[0], weights[-1]
    launch(
        warpgroup_one, (cdiv(a.n, tile.rows), tile.parts), y, x, *a.planes, *b.planes, y if residual is None else residual,
        part, arrived, count, alpha, a.n, K=a.k, FORMAT=a.format, ADD=residual is not None, GATED=len(weights) == 2,
        KIND=kind, PARTS=tile.parts, BM=tile.rows, BT=width, STAGES=tile.stages, warps=tile.rows // 16, stages=1,
        early=True,
    )  # fmt: skip


def run_three(
    launch: Any, tile: Tile, width: int, ys: Sequence[torch.Tensor], x: torch.Tensor, weights: Sequence[Packed],
    part: torch.Tensor, arrived: torch.Tensor, count: int,
) -> None:  # fmt: skip
    planes = [p for w in weights for p in w.planes]
    f0, f1, f2 = (w.format for w in weights)
    launch(
        warpgroup_three, (sum(cdiv(w.n, tile.rows) for w in weights), tile.parts), *ys, x, *planes, part, arrived, count,
        *(w.n for w in weights), K=weights[0].k, FORMAT0=f0, FORMAT1=f1, FORMAT2=f2, PARTS=tile.parts, BM=tile.rows,
        BT=width, STAGES=tile.stages, warps=tile.rows // 16, stages=1, early=True,
    )  # fmt: skip


def _either(few: rows.Few | None, more: Any, alone: bool, axis: str) -> rows.Few:
    """The kernels of the backend up to their own rows, these beyond."""
    least = 0 if few is None else few.most

    def run(live: Live) -> None:
        (more if few is None or live.count(axis) > least else few.run)(live)

    return rows.Few(run, MOST, alone)


@contextmanager
def lent(tiles: Tiles) -> Iterator[None]:
    """While it lasts, models are built with these kernels for the rows that `rows.py` leaves, up to MOST of them.

    One row still takes the matvecs.
    """
    before = rows._one, rows.linears, norm.arranger

    def arranger(site: Site, node: Node) -> Any:
        plain = before[2](site, node)
        if plain is None or site.compute != "float16":
            return plain
        spec, (axis, _) = node.spec, dims(node.outputs[0])
        source, gain = site.slot(node.inputs[0]), site.vector(node.inputs[1])  # type: ignore[arg-type]

        def fill(to: Slot, live: Live, width: int) -> None:
            if width <= 32:
                plain(to, live, width)
                return
            site.launch(
                norm_arranged, (width,), to.tensor, source.tensor, gain, live.count(axis), spec.eps, K=spec.k, BT=width,
                C=power_of_two(spec.k), warps=8 if spec.k > 2048 else 4, early=starts_early(site),
            )  # fmt: skip

        return fill

    def prepared(site: Site, x: Slot, k: int, axis: str, fill: rows.Fill | None) -> Any:
        to = site.scratch("one", MOST * k, torch.float16)

        def prepare(live: Live) -> torch.Tensor:
            count = live.count(axis)
            width = width_of(count)
            if fill is not None:
                fill(to, live, width)
            else:
                site.launch(
                    arrange, (k // 128, width // 16), to.tensor, x.tensor, count, K=k, BT=width, early=starts_early(site)
                )
            return to.tensor

        return prepare

    def room(site: Site, tile: Tile, ns: Sequence[int], sums: int) -> tuple[Slot, Slot]:
        count = sum(cdiv(n, tile.rows) for n in ns)
        size = sums * tile.parts * count * tile.rows * MOST if tile.parts > 1 else 1
        return site.scratch("one", size), site.zeros("one", count)

    def one(
        site: Site, x: Slot, y: Slot, weights: Sequence[Packed], biases: Sequence[torch.Tensor], residual: Slot | None,
        alpha: float, axis: str, kind: str, fill: rows.Fill | None,
    ) -> rows.Few | None:  # fmt: skip
        few = before[0](site, x, y, weights, biases, residual, alpha, axis, kind, fill)
        if not takes(site, weights) or biases:
            return few
        w = weights[0]
        tile = tiles.gated if len(weights) == 2 else tiles.one(w.n, w.k)
        prepare, (part, arrived) = prepared(site, x, w.k, axis, fill), room(site, tile, [w.n], len(weights))

        def more(live: Live) -> None:
            count, there, added = live.count(axis), prepare(live), None if residual is None else residual.tensor
            run_one(
                site.launch, tile, width_of(count), y.tensor, there, weights, added, part.tensor, arrived.tensor, count,
                alpha, kind,
            )  # fmt: skip

        return _either(few, more, fill is not None, axis)

    def linears(
        site: Site, x: Slot, ys: Sequence[Slot], weights: Sequence[Packed], biases: Sequence[torch.Tensor], axis: str,
        fill: rows.Fill | None,
    ) -> rows.Few | None:  # fmt: skip
        few = before[1](site, x, ys, weights, biases, axis, fill)
        if not takes(site, weights) or biases:
            return few
        prepare = prepared(site, x, weights[0].k, axis, fill)
        part, arrived = room(site, tiles.three, [w.n for w in weights], 1)

        def more(live: Live) -> None:
            count, there = live.count(axis), prepare(live)
            run_three(
                site.launch, tiles.three, width_of(count), [y.tensor for y in ys], there, weights, part.tensor,
                arrived.tensor, count,
            )  # fmt: skip

        return _either(few, more, fill is not None, axis)

    rows._one, rows.linears, norm.arranger = one, linears, arranger  # type: ignore[assignment]
    try:
        yield
    finally:
        rows._one, rows.linears, norm.arranger = before  # type: ignore[assignment]
