"""Attention of one sequence's new token, a program to a query head and a split of its keys.

Where programs are few, none may have much to do one after the other. A warp has keys of its own, and each row of a tile a
softmax of its own, so nothing waits for another warp until all keys are done; there are no matrix units, whose operands
would go through shared memory. Heads that share a key head each read its keys, which come from L2 then. Splits, the new key
and the sums of splits are those of `attend_one`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.attention.decode import LOG2E, finish, load_tile, oldest_key, rope_sin_cos, rotated_heads
from quarrel.triton_backend.attention.kv_codes import as_values
from quarrel.triton_backend.attention.rope import cache_row
from quarrel.triton_backend.attention.splits import split_of
from quarrel.triton_backend.elementwise.activation import tanh

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)


@triton.jit
def attend_head(
    output, partial, q, rotation, cache, sinks, sequences, item_start, score,
    S: tl.constexpr, EACH: tl.constexpr, ROTATE: tl.constexpr, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr,
    FORM: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (items, heads); the step has one row. Arguments as `attend_one`'s, but

    EACH  S as if each query head had a key head of its own, which is how the sums of splits meet
    """
    DIM: tl.constexpr = S.DIM
    WIDE: tl.constexpr = S.WIDE
    KV_HEADS: tl.constexpr = S.KV_HEADS
    SIZE: tl.constexpr = S.SIZE
    KIND: tl.constexpr = S.KIND
    GROUP: tl.constexpr = S.HEADS // KV_HEADS
    item = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // GROUP
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    splits = tl.load(item_start + 1)
    n_keys = tl.load(sequences.kv_len)
    if item >= splits:
        return
    split = split_of(n_keys, splits)
    start = item * split
    newest = start + split >= n_keys
    last = n_keys - 1
    stop = tl.minimum(last, start + split)
    oldest = start
    if S.WINDOW:
        EDGE: tl.constexpr = BLOCK_N if SIZE % BLOCK_N == 0 else SIZE
        oldest = oldest_key(last, score.window, S.CHUNKED)
        start = tl.maximum(start, oldest // EDGE * EDGE)
    b_k, b_v, k_scale, v_scale = load_tile(cache, sequences.table, kv_head, start, oldest, stop, S, BLOCK_N)
    d = tl.arange(0, WIDE)
    d_ok = d < DIM
    one = tl.arange(0, 1)
    if ROTATE != "":
        NEOX: tl.constexpr = ROTATE == "neox"
        sin, cos = rope_sin_cos(rotation, 0, NEOX, S)
        slot = tl.load(rotation.slots).to(tl.int64)
    else:
        slot = tl.load(sequences.table + last // SIZE).to(tl.int64) * SIZE + last % SIZE
    new_row = cache_row(slot, kv_head, KV_HEADS, SIZE)
    to = new_row * DIM + d
    # What is above comes with the step, before its first kernel, or from earlier steps.
    if PDL:
        tl.extra.cuda.gdc_wait()
    if ROTATE != "":
        b_q = rotated_heads(q, head * DIM + one, one < 1, sin, cos, rotation.q_magnitude, q, NEOX, 1, S)
        k = rotated_heads(rotation.k, kv_head * DIM + one, one < 1, sin, cos, rotation.k_magnitude, cache.k, NEOX, 1, S)
        b_q, b_new = tl.reshape(b_q, (WIDE,)), tl.reshape(k, (WIDE,))
        v_new = tl.load(rotation.v + kv_head * DIM + d).to(cache.v.dtype.element_ty)
        if newest & (head % GROUP == 0):
            tl.store(cache.k + to, b_new)
            tl.store(cache.v + to, v_new)
    else:
        b_q = tl.load(q + head * DIM + d, mask=d_ok, other=0.0)
        b_new = as_values(tl.load(cache.k + to, mask=d_ok, other=0), KIND, COMPUTE)
        v_new = as_values(tl.load(cache.v + to, mask=d_ok, other=0), KIND, COMPUTE)
    b_q = b_q.to(COMPUTE).to(tl.float32)
    # The scale is positive, so it may follow the maximum, where it is one operation with the difference.
    factor = score.scale
    own = tl.sum(b_q * b_new.to(tl.float32), 0)
    v_new = v_new.to(tl.float32)
    if KIND != "plain":
        own *= tl.load(cache.k_scale + new_row)
        v_new *= tl.load(cache.v_scale + new_row)
    if S.CAP:
        own, factor = tanh(own * (score.scale / score.cap)), score.cap * _LOG2E
    own = tl.where(newest, own * factor, float("-inf"))
    acc = tl.zeros([BLOCK_N, WIDE], tl.float32)
    top = tl.full([BLOCK_N], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    for begin in tl.range(start, stop, BLOCK_N, num_stages=1):
        n_k, n_v, next_k_scale, next_v_scale = load_tile(
            cache, sequences.table, kv_head, begin + BLOCK_N, oldest, stop, S, BLOCK_N
        )  # fmt: skip
        products = tl.sum(as_values(b_k, KIND, COMPUTE).to(tl.float32) * b_q[None, :], 1)  # [BLOCK_N]
        if KIND != "plain":
            products *= k_scale
        if S.CAP:
            products = tanh(products * (score.scale / score.cap))
        key = begin + tl.arange(0, BLOCK_N)
        seen = key < stop
        if S.WINDOW:
            seen = seen & (key >= oldest)
        products = tl.where(seen, products * factor, float("-inf"))
        new_top = tl.maximum(top, products)
        # Where no key has been seen yet -inf stays; zero in its place leaves every power zero.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(products - base)
        fade = tl.exp2(top - base)
        total = total * fade + p
        if KIND != "plain":
            p *= v_scale
        acc = acc * fade[:, None] + as_values(b_v, KIND, COMPUTE).to(tl.float32) * p[:, None]
        top = new_top
        b_k, b_v, k_scale, v_scale = n_k, n_v, next_k_scale, next_v_scale
    best = tl.maximum(tl.max(top, 0), own)
    base = tl.where(best == float("-inf"), 0.0, best)
    weight = tl.exp2(top - base)
    mine = tl.exp2(own - base)
    total = tl.sum(total * weight, 0) + mine
    acc = tl.sum(acc * weight[:, None], 0) + mine * v_new
    sums = acc[None, :], best + tl.zeros([1], tl.float32), total + tl.zeros([1], tl.float32)
    first = item * 0
    finish(
        output, partial, sums, sinks, item, first, first, splits, head, first.to(tl.int64), head + one, one < 1, EACH,
        ROWS=1, AT_ONCE=AT_ONCE, AHEAD=1, FORM=FORM, H=1,
    )  # fmt: skip
