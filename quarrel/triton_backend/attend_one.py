"""Attention of sequences with one new token, cut into splits of their keys, with the rotation and the append before it.

The older keys were written by earlier steps, so their first tile is on its way before the kernel waits for the queries; the
new key and value never come back from memory where this kernel writes them. They begin the sums of the split that they
belong to, whoever wrote them, so a row's bits are the same either way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.codes import as_values
from quarrel.triton_backend.elementwise import tanh
from quarrel.triton_backend.halved import store_halved
from quarrel.triton_backend.rope import cache_row, sin_cos, turned
from quarrel.triton_backend.splits import PLACES, split_of

LOG2E = 1.4426950408889634
_LOG2E: tl.constexpr = tl.constexpr(LOG2E)


@triton.jit
def find(starts, n, item, PER: tl.constexpr):
    """The last s below n with starts[s] // PER + (s if PER > 1 else 0) <= item: how many there are, less one."""
    found = item * 0 - 1
    for begin in range(0, n, 64):
        i = begin + tl.arange(0, 64)
        at = tl.load(starts + i, mask=i < n, other=0)
        if PER > 1:
            at = at // PER + i
        found += tl.sum(((at <= item) & (i < n)).to(tl.int32), 0)
    return found


@triton.jit
def sink(acc, top, total, sinks, head, ok):
    """Adds a sink's share to the sum."""
    value = tl.load(sinks + head, mask=ok, other=0.0) * _LOG2E
    new_top = tl.maximum(top, value)
    fade = tl.exp2(top - new_top)
    return acc * fade[:, None], total * fade + tl.exp2(value - new_top)


@triton.jit
def _tile(
    keys, values, k_scales, v_scales, p_table, kv_head, begin, stop, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Keys and values begin.. below `stop`, [BLOCK_N, WIDE] each, and the scales of codes [BLOCK_N]; zeros beyond."""
    d = tl.arange(0, WIDE)
    key = begin + tl.arange(0, BLOCK_N)
    ok = key < stop
    block = tl.load(p_table + key // SIZE, mask=ok, other=0).to(tl.int64)
    row = (block * KV_HEADS + kv_head) * SIZE + key % SIZE
    at = row[:, None] * DIM + d[None, :]
    mask = ok[:, None] & (d < DIM)[None, :]
    k_scale = tl.zeros([BLOCK_N], tl.float32)
    v_scale = k_scale
    if KIND != "plain":
        k_scale, v_scale = tl.load(k_scales + row, mask=ok, other=0.0), tl.load(v_scales + row, mask=ok, other=0.0)
    return tl.load(keys + at, mask=mask, other=0), tl.load(values + at, mask=mask, other=0), k_scale, v_scale


@triton.jit
def rotated(
    x, at, ok, sin, cos, magnitude, to, NEOX: tl.constexpr, M: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Rows at [M] of whole heads, rotated, [M, 2 HALF], rounded to the type of `to`."""
    i = tl.arange(0, HALF)[None, :]
    if NEOX:
        first, second = i, i + HALF
    else:
        first, second = i * 2, i * 2 + 1
    a = tl.load(x + at[:, None] + first, mask=ok[:, None], other=0.0).to(tl.float32)
    b = tl.load(x + at[:, None] + second, mask=ok[:, None], other=0.0).to(tl.float32)
    low, high = turned(a, b, sin, cos, magnitude)
    both = tl.join(low, high)  # [M, HALF, 2]
    if NEOX:
        both = tl.permute(both, (0, 2, 1))
    return tl.reshape(both, (M, 2 * HALF)).to(to.dtype.element_ty)


@triton.jit(do_not_specialize=["seqs"])
def attend_one(
    out, halved, part, top_sum, arrived, q, k, v, positions, freq, slots, q_magnitude, k_magnitude, keys, values, k_scales,
    v_scales, sinks, query_start, kv_len, table, table_width, item_start, seqs, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, ROTATE: tl.constexpr, NEOX: tl.constexpr,
    SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr,
    AT_ONCE: tl.constexpr, HALVED: tl.constexpr, PLAIN: tl.constexpr, EARLY: tl.constexpr, KIND: tl.constexpr,
    COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROTATE: q, k and v are what the linear maps gave, and this kernel appends k and v; else q is rotated and the cache
    has the new key. EARLY: nothing in this step writes older keys, so they may be read before the kernel ahead is over."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    seq = find(item_start, seqs, item, 1)
    first_item = tl.load(item_start + seq)
    splits = tl.load(item_start + seq + 1) - first_item
    if item - first_item >= splits:
        return
    n_keys = tl.load(kv_len + seq)
    split = split_of(n_keys, SPLIT, MOST)
    start = (item - first_item) * split
    newest = start + split >= n_keys
    stop = tl.minimum(n_keys - 1, start + split)
    if WINDOW:
        # No further back than the block of the oldest key: those before it may be another sequence's by now.
        EDGE: tl.constexpr = BLOCK_N if SIZE % BLOCK_N == 0 else SIZE
        start = tl.maximum(start, tl.maximum(n_keys - window, 0) // EDGE * EDGE)
    p_table = table + seq.to(tl.int64) * tl.load(table_width)
    b_k, b_v, k_scale, v_scale = _tile(
        keys, values, k_scales, v_scales, p_table, kv_head, start, stop, KV_HEADS, DIM, WIDE, SIZE, BLOCK_N, KIND
    )
    lane = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + lane
    row_ok = lane < GROUP
    d = tl.arange(0, WIDE)
    d_ok = d < DIM
    token = tl.load(query_start + seq).to(tl.int64)
    row = token * HEADS
    last = n_keys - 1
    if ROTATE:
        i = tl.arange(0, DIM // 2)
        sin, cos = sin_cos(tl.load(positions + token).to(tl.float32) * tl.load(freq + i))
        sin, cos = sin[None, :], cos[None, :]
        to = cache_row(tl.load(slots + token).to(tl.int64), kv_head, KV_HEADS, SIZE) * DIM
    else:
        new_row = cache_row(tl.load(p_table + last // SIZE).to(tl.int64) * SIZE + last % SIZE, kv_head, KV_HEADS, SIZE)
        to = new_row * DIM
    # What is above comes with the step, before its first kernel, or from earlier steps.
    if PDL and EARLY:
        tl.extra.cuda.gdc_wait()
    if ROTATE:
        b_q = rotated(q, (row + head) * DIM, row_ok, sin, cos, q_magnitude, q, NEOX, BLOCK_M, DIM // 2)
        one = tl.arange(0, 1)
        at = (token * KV_HEADS + kv_head) * DIM
        b_new = tl.reshape(rotated(k, at + one, one < 1, sin, cos, k_magnitude, keys, NEOX, 1, DIM // 2), (WIDE,))
        v_new = tl.load(v + at + d).to(values.dtype.element_ty)
        if newest:
            tl.store(keys + to + d, b_new)
            tl.store(values + to + d, v_new)
    else:
        mask_q = row_ok[:, None] & d_ok[None, :]
        b_q = tl.load(q + (row + head)[:, None] * DIM + d[None, :], mask=mask_q, other=0.0)
        b_new = as_values(tl.load(keys + to + d, mask=d_ok, other=0), KIND, COMPUTE)
        v_new = as_values(tl.load(values + to + d, mask=d_ok, other=0), KIND, COMPUTE)
    b_q = b_q.to(COMPUTE)
    # The scale is positive, so it may follow the maximum, where it is one operation with the difference.
    factor = scale
    own = tl.sum(b_q.to(tl.float32) * b_new.to(tl.float32)[None, :], 1)
    if KIND != "plain":
        own = own * tl.load(k_scales + new_row)
    if CAP:
        own, factor = tanh(own * (scale / cap)), cap * _LOG2E
    there = newest & (lane >= 0)
    top = tl.where(there, own * factor, float("-inf"))
    total = tl.where(there, 1.0, 0.0)
    v_new = v_new.to(tl.float32)
    if KIND != "plain":
        v_new = v_new * tl.load(v_scales + new_row)
    acc = tl.where(there[:, None], v_new[None, :], 0.0)
    for begin in tl.range(start, stop, BLOCK_N, num_stages=1):
        n_k, n_v, next_k_scale, next_v_scale = _tile(
            keys, values, k_scales, v_scales, p_table, kv_head, begin + BLOCK_N, stop, KV_HEADS, DIM, WIDE, SIZE, BLOCK_N,
            KIND,
        )  # fmt: skip
        score = tl.dot(b_q, tl.trans(as_values(b_k, KIND, COMPUTE)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if KIND != "plain":
            score = score * k_scale[None, :]
        if CAP:
            score = tanh(score * (scale / cap))
        key = begin + tl.arange(0, BLOCK_N)
        seen = key < stop
        if WINDOW:
            seen = seen & (last - key < window)
        score = tl.where(seen[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * factor)
        # Where no key has been seen yet -inf stays; zero in its place leaves every power zero.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score * factor - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        if KIND != "plain":
            p = p * v_scale[None, :]
        acc = tl.dot(p.to(COMPUTE), as_values(b_v, KIND, COMPUTE), acc * fade[:, None], input_precision="ieee")
        top = new_top
        b_k, b_v, k_scale, v_scale = n_k, n_v, next_k_scale, next_v_scale
    finish(
        out, halved, part, top_sum, arrived, acc, top, total, sinks, item, seq, first_item, splits, kv_head, token, head,
        row_ok, HEADS, KV_HEADS, DIM, WIDE, SINKS, SHARE, BLOCK_M, AT_ONCE, 1, HALVED, PLAIN, 1,
    )  # fmt: skip


@triton.jit
def finish(
    out, halved, part, top_sum, arrived, acc, top, total, sinks, item, seq, first_item, splits, kv_head, token, head,
    row_ok, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SINKS: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, AHEAD: tl.constexpr, HALVED: tl.constexpr,
    PLAIN: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Stores rows [ROWS] of H key heads, or leaves those of a split for the last program to arrive, which adds them all."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    d = tl.arange(0, WIDE)
    p_out = out + token * HEADS * DIM
    if splits == 1:
        if SINKS:
            acc, total = sink(acc, top, total, sinks, head, row_ok)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        store_heads(p_out, halved, acc, head, row_ok, HEADS, DIM, WIDE, ROWS, HALVED, PLAIN)
    else:
        mask = row_ok[:, None] & (d < DIM)[None, :]
        place = item.to(tl.int64) * HEADS + head
        tl.store(part + place[:, None] * DIM + d[None, :], acc, mask=mask)
        tl.store(top_sum + place * 2, top, mask=row_ok)
        tl.store(top_sum + place * 2 + 1, total, mask=row_ok)
        tl.debug_barrier()
        if tl.atomic_add(arrived + seq * KV_HEADS + kv_head, 1, sem="acq_rel") == splits - 1:
            tl.store(arrived + seq * KV_HEADS + kv_head, 0)
            for one in range(H):
                combine(
                    p_out, halved, part, top_sum, sinks, first_item, splits, (kv_head + one) * GROUP, GROUP, HEADS, DIM,
                    WIDE, SINKS, SHARE, AT_ONCE, AHEAD, HALVED, PLAIN,
                )  # fmt: skip


@triton.jit
def combine(
    p_out, halved, part, top_sum, sinks, first_item, splits, first_head, GROUP: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, SINKS: tl.constexpr, SHARE: tl.constexpr, AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr, HALVED: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Adds the splits of a key head's queries, AT_ONCE at a time, in order; with AHEAD - 1 such parts on their way."""
    lane = tl.arange(0, SHARE)
    head = first_head + lane
    row_ok = lane < GROUP
    d = tl.arange(0, WIDE)
    i = tl.arange(0, PLACES)
    seen = row_ok[:, None] & (i < splits)[None, :]
    place = (first_item + i).to(tl.int64)[None, :] * HEADS + head[:, None]  # [SHARE, splits]
    tops = tl.load(top_sum + place * 2, mask=seen, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(tops, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.load(top_sum + place * 2 + 1, mask=seen, other=0.0, cache_modifier=".cg")
    total = tl.sum(sums * tl.exp2(tops - base[:, None]), 1)
    acc = tl.zeros([SHARE, WIDE], tl.float32)
    for begin in tl.range(0, splits, AT_ONCE, num_stages=AHEAD):
        j = begin + tl.arange(0, AT_ONCE)
        ok = row_ok[:, None] & (j < splits)[None, :]
        at = (first_item + j).to(tl.int64)[None, :] * HEADS + head[:, None]
        weight = tl.exp2(tl.load(top_sum + at * 2, mask=ok, other=float("-inf"), cache_modifier=".cg") - base[:, None])
        piece = tl.load(
            part + at[:, :, None] * DIM + d[None, None, :], mask=ok[:, :, None] & (d < DIM)[None, None, :], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        acc += tl.sum(piece * weight[:, :, None], 1)
    if SINKS:
        acc, total = sink(acc, base, total, sinks, head, row_ok)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    store_heads(p_out, halved, acc, head, row_ok, HEADS, DIM, WIDE, SHARE, HALVED, PLAIN)


@triton.jit
def store_heads(
    p_out, halved, acc, head, row_ok, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    HALVED: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Heads [ROWS] of a token: as they are, in halved form (for one token, and a head of whole blocks), or both."""
    d = tl.arange(0, WIDE)
    if PLAIN:
        mask = row_ok[:, None] & (d < DIM)[None, :]
        tl.store(p_out + head[:, None] * DIM + d[None, :], acc.to(p_out.dtype.element_ty), mask=mask)
    if HALVED:
        PER: tl.constexpr = DIM // 32
        block = tl.reshape(head[:, None] * PER + tl.arange(0, PER)[None, :], (ROWS * PER,))
        ok = tl.reshape(tl.broadcast_to(row_ok[:, None], (ROWS, PER)), (ROWS * PER,))
        store_halved(halved, tl.reshape(acc, (ROWS * PER, 2, 16)), block, ok, HEADS * DIM)
