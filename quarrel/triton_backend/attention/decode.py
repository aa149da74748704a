"""Attention of sequences with one new token, cut into splits of their keys, with the rotation and the append before it.

The older keys were written by earlier steps, so their first tile is on its way before the kernel waits for the queries; the
new key and value never come back from memory where this kernel writes them. They begin the sums of the split that they
belong to, whoever wrote them, so a row's bits are the same either way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.attention.kv_codes import as_values
from quarrel.triton_backend.attention.rope import cache_row, rotate_pairs, sin_cos
from quarrel.triton_backend.attention.splits import PLACES, split_of
from quarrel.triton_backend.elementwise.activation import tanh
from quarrel.triton_backend.formats.int8x2 import store_int8x2

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
def oldest_key(position, window, CHUNKED: tl.constexpr):
    """The first key that queries at these positions see, where there are windows."""
    if CHUNKED:
        oldest = position // window * window
    else:
        oldest = tl.maximum(position + 1 - window, 0)
    return oldest


@triton.jit
def load_tile(cache, p_table, kv_head, begin, oldest, stop, S: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys and values begin.. below `stop`, [BLOCK_N, WIDE] each, and the scales of codes [BLOCK_N]; zeros beyond, and with
    a window before `oldest`: those rows may be another sequence's by now."""
    d = tl.arange(0, S.WIDE)
    key = begin + tl.arange(0, BLOCK_N)
    ok = key < stop
    if S.WINDOW:
        ok = ok & (key >= oldest)
    block = tl.load(p_table + key // S.SIZE, mask=ok, other=0).to(tl.int64)
    row = (block * S.KV_HEADS + kv_head) * S.SIZE + key % S.SIZE
    at = row[:, None] * S.DIM + d[None, :]
    mask = ok[:, None] & (d < S.DIM)[None, :]
    k_scale = tl.zeros([BLOCK_N], tl.float32)
    v_scale = k_scale
    if S.KIND != "plain":
        k_scale = tl.load(cache.k_scale + row, mask=ok, other=0.0)
        v_scale = tl.load(cache.v_scale + row, mask=ok, other=0.0)
    return tl.load(cache.k + at, mask=mask, other=0), tl.load(cache.v + at, mask=mask, other=0), k_scale, v_scale


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
    low, high = rotate_pairs(a, b, sin, cos, magnitude)
    both = tl.join(low, high)  # [M, HALF, 2]
    if NEOX:
        both = tl.permute(both, (0, 2, 1))
    return tl.reshape(both, (M, 2 * HALF)).to(to.dtype.element_ty)


@triton.jit
def rope_sin_cos(rotation, token, NEOX: tl.constexpr, S: tl.constexpr):
    """Sine and cosine of a token's angles, of each pair [1, DIM / 2], or with S.ROT of each column [1, DIM]."""
    if S.ROT == 0:
        i = tl.arange(0, S.DIM // 2)
        angle = tl.load(rotation.positions + token).to(tl.float32) * tl.load(rotation.freq + i)
    else:
        HALF: tl.constexpr = S.ROT // 2
        AXES: tl.constexpr = S.AXES
        DIM: tl.constexpr = S.DIM
        d = tl.arange(0, DIM)
        i = d % HALF if NEOX else d // 2
        angle = tl.zeros([DIM], tl.float32)
        # A pair has a frequency on one axis, so the sum is exact.
        for axis in tl.static_range(AXES):
            position = tl.load(rotation.positions + token * AXES + axis).to(tl.float32)
            angle += position * tl.load(rotation.freq + axis * HALF + i, mask=d < S.ROT, other=0.0)
    sin, cos = sin_cos(angle)
    return sin[None, :], cos[None, :]


@triton.jit
def rotated_heads(x, at, ok, sin, cos, magnitude, to, NEOX: tl.constexpr, M: tl.constexpr, S: tl.constexpr):
    """Rows at [M] of heads, whole ones or their first S.ROT columns, rotated, [M, DIM], rounded to the type of `to`."""
    if S.ROT == 0:
        return rotated(x, at, ok, sin, cos, magnitude, to, NEOX, M, S.DIM // 2)
    else:
        d = tl.arange(0, S.DIM)[None, :]
        inside = d < S.ROT
        if NEOX:
            first = d < S.ROT // 2
            other = tl.where(first, d + S.ROT // 2, d - S.ROT // 2)
        else:
            first = d % 2 == 0
            other = d ^ 1
        p_x = x + at[:, None]
        v = tl.load(p_x + d, mask=ok[:, None], other=0.0).to(tl.float32)
        w = tl.load(p_x + tl.where(inside, other, d), mask=ok[:, None], other=0.0).to(tl.float32)
        low, high = rotate_pairs(tl.where(first, v, w), tl.where(first, w, v), sin, cos, magnitude)
        return tl.where(inside, tl.where(first, low, high), v).to(to.dtype.element_ty)


@triton.jit(do_not_specialize=["seqs"])
def attend_one(
    output, partial, q, rotation, cache, sinks, sequences, item_start, seqs, score,
    S: tl.constexpr, ROTATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr,
    FORM: tl.constexpr, EARLY: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of sequences with one new token; a program takes a split of one sequence's keys, for one key head.

    Grid (items, n_kv). Records, their shapes and types are those of `records.py`.

    output      where the result goes, `[T, heads * head_dim]`
    partial     where the splits of a sequence meet
    q           act `[T, heads * head_dim]`; with ROTATE as the linear map gave it, else rotated
    rotation    read with ROTATE only
    sinks       float32 `[heads]`, read with S.SINKS only
    item_start  int32 `[S + 1]`, where each sequence's items begin
    ROTATE      the style of a rotation ("norm" or "neox") that this kernel does itself, with the append of k and v; or "":
                the cache has the new key
    BLOCK_M     query heads of a tile, SHARE of them padded; BLOCK_N: keys of a tile
    AT_ONCE     splits that are added at once
    EARLY       nothing in this step writes older keys, so they are read before the kernel ahead is over
    """
    GROUP: tl.constexpr = S.HEADS // S.KV_HEADS
    DIM: tl.constexpr = S.DIM
    WIDE: tl.constexpr = S.WIDE
    KV_HEADS: tl.constexpr = S.KV_HEADS
    SIZE: tl.constexpr = S.SIZE
    KIND: tl.constexpr = S.KIND
    NEOX: tl.constexpr = ROTATE == "neox"
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
    n_keys = tl.load(sequences.kv_len + seq)
    split = split_of(n_keys, splits)
    start = (item - first_item) * split
    newest = start + split >= n_keys
    stop = tl.minimum(n_keys - 1, start + split)
    oldest = start
    if S.WINDOW:
        EDGE: tl.constexpr = BLOCK_N if SIZE % BLOCK_N == 0 else SIZE
        oldest = oldest_key(n_keys - 1, score.window, S.CHUNKED)
        start = tl.maximum(start, oldest // EDGE * EDGE)
    p_table = sequences.table + seq.to(tl.int64) * tl.load(sequences.table_width)
    b_k, b_v, k_scale, v_scale = load_tile(cache, p_table, kv_head, start, oldest, stop, S, BLOCK_N)
    lane = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + lane
    row_ok = lane < GROUP
    d = tl.arange(0, WIDE)
    d_ok = d < DIM
    token = tl.load(sequences.query_start + seq).to(tl.int64)
    row = token * S.HEADS
    last = n_keys - 1
    if ROTATE != "":
        sin, cos = rope_sin_cos(rotation, token, NEOX, S)
        to = cache_row(tl.load(rotation.slots + token).to(tl.int64), kv_head, KV_HEADS, SIZE) * DIM
    else:
        new_row = cache_row(tl.load(p_table + last // SIZE).to(tl.int64) * SIZE + last % SIZE, kv_head, KV_HEADS, SIZE)
        to = new_row * DIM
    # What is above comes with the step, before its first kernel, or from earlier steps.
    if PDL and EARLY:
        tl.extra.cuda.gdc_wait()
    if ROTATE != "":
        b_q = rotated_heads(q, (row + head) * DIM, row_ok, sin, cos, rotation.q_magnitude, q, NEOX, BLOCK_M, S)
        one = tl.arange(0, 1)
        at = (token * KV_HEADS + kv_head) * DIM
        b_new = rotated_heads(rotation.k, at + one, one < 1, sin, cos, rotation.k_magnitude, cache.k, NEOX, 1, S)
        b_new = tl.reshape(b_new, (WIDE,))
        v_new = tl.load(rotation.v + at + d).to(cache.v.dtype.element_ty)
        if newest:
            tl.store(cache.k + to + d, b_new)
            tl.store(cache.v + to + d, v_new)
    else:
        mask_q = row_ok[:, None] & d_ok[None, :]
        b_q = tl.load(q + (row + head)[:, None] * DIM + d[None, :], mask=mask_q, other=0.0)
        b_new = as_values(tl.load(cache.k + to + d, mask=d_ok, other=0), KIND, COMPUTE)
        v_new = as_values(tl.load(cache.v + to + d, mask=d_ok, other=0), KIND, COMPUTE)
    b_q = b_q.to(COMPUTE)
    # The scale is positive, so it may follow the maximum, where it is one operation with the difference.
    factor = score.scale
    own = tl.sum(b_q.to(tl.float32) * b_new.to(tl.float32)[None, :], 1)
    if KIND != "plain":
        own = own * tl.load(cache.k_scale + new_row)
    if S.CAP:
        own, factor = tanh(own * (score.scale / score.cap)), score.cap * _LOG2E
    there = newest & (lane >= 0)
    top = tl.where(there, own * factor, float("-inf"))
    total = tl.where(there, 1.0, 0.0)
    v_new = v_new.to(tl.float32)
    if KIND != "plain":
        v_new = v_new * tl.load(cache.v_scale + new_row)
    acc = tl.where(there[:, None], v_new[None, :], 0.0)
    for begin in tl.range(start, stop, BLOCK_N, num_stages=1):
        n_k, n_v, next_k_scale, next_v_scale = load_tile(cache, p_table, kv_head, begin + BLOCK_N, oldest, stop, S, BLOCK_N)
        products = tl.dot(b_q, tl.trans(as_values(b_k, KIND, COMPUTE)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if KIND != "plain":
            products = products * k_scale[None, :]
        if S.CAP:
            products = tanh(products * (score.scale / score.cap))
        key = begin + tl.arange(0, BLOCK_N)
        seen = key < stop
        if S.WINDOW:
            seen = seen & (key >= oldest)
        products = tl.where(seen[None, :], products, float("-inf"))
        new_top = tl.maximum(top, tl.max(products, 1) * factor)
        # Where no key has been seen yet -inf stays; zero in its place leaves every power zero.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(products * factor - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        if KIND != "plain":
            p = p * v_scale[None, :]
        acc = tl.dot(p.to(COMPUTE), as_values(b_v, KIND, COMPUTE), acc * fade[:, None], input_precision="ieee")
        top = new_top
        b_k, b_v, k_scale, v_scale = n_k, n_v, next_k_scale, next_v_scale
    finish(
        output, partial, (acc, top, total), sinks, item, seq, first_item, splits, kv_head, token, head, row_ok, S,
        ROWS=BLOCK_M, AT_ONCE=AT_ONCE, AHEAD=1, FORM=FORM, H=1,
    )  # fmt: skip


@triton.jit
def finish(
    output, partial, sums, sinks, item, seq, first_item, splits, kv_head, token, head, row_ok, S: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr, AHEAD: tl.constexpr, FORM: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Stores rows [ROWS] of H key heads, or leaves those of a split for the last program to arrive, which adds them all."""
    GROUP: tl.constexpr = S.HEADS // S.KV_HEADS
    acc, top, total = sums
    d = tl.arange(0, S.WIDE)
    p_out = output.plain + token * S.HEADS * S.DIM
    if splits == 1:
        if S.SINKS:
            acc, total = sink(acc, top, total, sinks, head, row_ok)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        store_heads(p_out, output.int8x2, acc, head, row_ok, S, ROWS, FORM)
    else:
        mask = row_ok[:, None] & (d < S.DIM)[None, :]
        place = item.to(tl.int64) * S.HEADS + head
        tl.store(partial.sums + place[:, None] * S.DIM + d[None, :], acc, mask=mask)
        tl.store(partial.top_sum + place * 2, top, mask=row_ok)
        tl.store(partial.top_sum + place * 2 + 1, total, mask=row_ok)
        tl.debug_barrier()
        p_arrived = partial.arrived + seq * S.KV_HEADS + kv_head
        if tl.atomic_add(p_arrived, 1, sem="acq_rel") == splits - 1:
            tl.store(p_arrived, 0)
            for one in range(H):
                first_head = (kv_head + one) * GROUP
                combine(p_out, output.int8x2, partial, sinks, first_item, splits, first_head, S, AT_ONCE, AHEAD, FORM)


@triton.jit
def combine(
    p_out, int8x2, partial, sinks, first_item, splits, first_head, S: tl.constexpr, AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Adds the splits of a key head's queries, AT_ONCE at a time, in order; with AHEAD - 1 such parts on their way."""
    SHARE: tl.constexpr = S.SHARE
    WIDE: tl.constexpr = S.WIDE
    lane = tl.arange(0, SHARE)
    head = first_head + lane
    row_ok = lane < S.HEADS // S.KV_HEADS
    d = tl.arange(0, S.WIDE)
    i = tl.arange(0, PLACES)
    seen = row_ok[:, None] & (i < splits)[None, :]
    place = (first_item + i).to(tl.int64)[None, :] * S.HEADS + head[:, None]  # [SHARE, splits]
    tops = tl.load(partial.top_sum + place * 2, mask=seen, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(tops, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.load(partial.top_sum + place * 2 + 1, mask=seen, other=0.0, cache_modifier=".cg")
    total = tl.sum(sums * tl.exp2(tops - base[:, None]), 1)
    acc = tl.zeros([SHARE, WIDE], tl.float32)
    for begin in tl.range(0, splits, AT_ONCE, num_stages=AHEAD):
        j = begin + tl.arange(0, AT_ONCE)
        ok = row_ok[:, None] & (j < splits)[None, :]
        at = (first_item + j).to(tl.int64)[None, :] * S.HEADS + head[:, None]
        p_top = partial.top_sum + at * 2
        weight = tl.exp2(tl.load(p_top, mask=ok, other=float("-inf"), cache_modifier=".cg") - base[:, None])
        piece = tl.load(
            partial.sums + at[:, :, None] * S.DIM + d[None, None, :],
            mask=ok[:, :, None] & (d < S.DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        acc += tl.sum(piece * weight[:, :, None], 1)
    if S.SINKS:
        acc, total = sink(acc, base, total, sinks, head, row_ok)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    store_heads(p_out, int8x2, acc, head, row_ok, S, SHARE, FORM)


@triton.jit
def store_heads(p_out, int8x2, acc, head, row_ok, S: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Heads [ROWS] of a token, plain, as int8x2 (for a step of one row, and a head of whole blocks of 32), or both."""
    d = tl.arange(0, S.WIDE)
    if FORM != "int8x2":
        mask = row_ok[:, None] & (d < S.DIM)[None, :]
        tl.store(p_out + head[:, None] * S.DIM + d[None, :], acc.to(p_out.dtype.element_ty), mask=mask)
    if FORM != "plain":
        PER: tl.constexpr = S.DIM // 32
        K: tl.constexpr = S.HEADS * S.DIM
        block = tl.reshape(head[:, None] * PER + tl.arange(0, PER)[None, :], (ROWS * PER,))
        ok = tl.reshape(tl.broadcast_to(row_ok[:, None], (ROWS, PER)), (ROWS * PER,))
        store_int8x2(int8x2, tl.reshape(acc, (ROWS * PER, 2, 16)), block, ok, K)
