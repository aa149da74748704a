"""Attention of many sequences with one new token each, or of many keys: each warp walks keys of its own.

A program has H key heads and as many warps. A batched product gives each warp KEYS keys of one head at a time, which lie in
one block, so no warp waits for another's maximum or sum: the softmax stays in its registers. Whole tiles are copied to
shared memory STAGES - 1 ahead of their turn, the numbers of their blocks are loaded a tile earlier still, and the loop
masks nothing but what a window cuts and what lies beyond a head of no power of two. Arguments, splits, the new key and the
sums of splits are those of `attend_one`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.attend_one import LOG2E, find, finish, rotated
from quarrel.triton_backend.codes import as_values
from quarrel.triton_backend.elementwise import tanh
from quarrel.triton_backend.rope import cache_row, sin_cos
from quarrel.triton_backend.splits import split_of

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)


@triton.jit
def _blocks(p_table, key, stop, SIZE: tl.constexpr, H: tl.constexpr, ASM: tl.constexpr):
    """The block of a tile's keys, for each head [H]; beyond `stop` that of the last one. ASM, as Triton's pipeline would
    copy what `tl.load` reads to shared memory, and wait there for all keys on their way, in each tile."""
    key = tl.minimum(key + tl.arange(0, H) * 0, tl.maximum(stop - 1, 0))
    p = p_table + key // SIZE
    if ASM:
        found = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [p.to(tl.int64)], tl.int32, True, 1)
    else:
        found = tl.load(p)
    return found.to(tl.int64)


@triton.jit
def _ask(
    x, block, kv_head, begin, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    KEYS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Asks the second level for a tile, lines of 128 bytes; a tile that is cut short may be asked for whole."""
    BITS: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (KEYS * DIM * BITS + 1023) // 1024
    h = tl.arange(0, H)
    at = ((block * KV_HEADS + kv_head + h) * SIZE + begin % SIZE) * (DIM * BITS // 8)
    # A power of two of them: the last is asked for again where a head is no power of two.
    line = tl.minimum(tl.arange(0, KEYS * WIDE * BITS // 1024), LINES - 1)
    where = x.to(tl.int64) + at[:, None] + line[None, :] * 128
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [where], tl.int32, False, 1)


@triton.jit
def _values(codes, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """`as_values`, but codes of fp8 by the device's own conversion, two at a time: 256 times as much."""
    if KIND == "fp8":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(COMPUTE)
    else:
        return as_values(codes, KIND, COMPUTE)


@triton.jit
def _tile(
    keys, values, k_scales, v_scales, block, kv_head, begin, stop, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr, MASK: tl.constexpr, H: tl.constexpr, KEYS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Keys and values of a tile, [H, KEYS, WIDE] each, and the scales of codes [H, KEYS]. MASK: zeros from `stop` on."""
    h, n, d = tl.arange(0, H), tl.arange(0, KEYS), tl.arange(0, WIDE)
    row = ((block * KV_HEADS + kv_head + h) * SIZE + begin % SIZE)[:, None] + n[None, :]  # [H, KEYS]
    at = row[:, :, None] * DIM + d[None, None, :]
    ok = tl.broadcast_to((begin + n < stop)[None, :], (H, KEYS))
    k_scale = tl.zeros([H, KEYS], tl.float32)
    v_scale = k_scale
    if MASK:
        mask = ok[:, :, None] & (d < DIM)[None, None, :]
        b_k, b_v = tl.load(keys + at, mask=mask, other=0), tl.load(values + at, mask=mask, other=0)
        if KIND != "plain":
            k_scale, v_scale = tl.load(k_scales + row, mask=ok, other=0.0), tl.load(v_scales + row, mask=ok, other=0.0)
    else:
        if DIM == WIDE:
            b_k, b_v = tl.load(keys + at), tl.load(values + at)
        else:
            mask = (d < DIM)[None, None, :]
            b_k, b_v = tl.load(keys + at, mask=mask, other=0), tl.load(values + at, mask=mask, other=0)
        if KIND != "plain":
            k_scale, v_scale = tl.load(k_scales + row), tl.load(v_scales + row)
    return b_k, b_v, k_scale, v_scale


@triton.jit
def _take(
    acc, top, total, b_q, b_k, b_v, k_scale, v_scale, begin, stop, last, scale, cap, window, WINDOW: tl.constexpr,
    CAP: tl.constexpr, MASK: tl.constexpr, KEYS: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Takes in a tile: sums [H, M, WIDE], maxima and totals [H, M]. MASK: keys from `stop` on are not there."""
    key = (begin + tl.arange(0, KEYS))[None, None, :]
    score = tl.dot(b_q, tl.permute(_values(b_k, KIND, COMPUTE), (0, 2, 1)), input_precision="ieee")  # [H, M, KEYS]
    if KIND != "plain":
        if KIND == "fp8":
            k_scale, v_scale = k_scale * 0.00390625, v_scale * 0.00390625
        score = score * k_scale[:, None, :]
    # The scale is positive, so it may follow the maximum, where it is one operation with the difference.
    factor = scale
    if CAP:
        score, factor = tanh(score * (scale / cap)), cap * _LOG2E
    if MASK or WINDOW:
        seen = key < stop
        if WINDOW:
            seen = seen & (last - key < window)
        score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 2) * factor)
    base = new_top
    if MASK or WINDOW:
        # Where no key has been seen yet -inf stays; zero in its place leaves every power zero.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(score * factor - base[:, :, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(p, 2)
    if KIND != "plain":
        p = p * v_scale[:, None, :]
    acc = tl.dot(p.to(COMPUTE), _values(b_v, KIND, COMPUTE), acc * fade[:, :, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit(do_not_specialize=["seqs"])
def attend_warps(
    out, halved, part, top_sum, arrived, q, k, v, positions, freq, slots, q_magnitude, k_magnitude, keys, values, k_scales,
    v_scales, sinks, query_start, kv_len, table, table_width, item_start, seqs, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, ROTATE: tl.constexpr, NEOX: tl.constexpr,
    SHARE: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr, AT_ONCE: tl.constexpr,
    HALVED: tl.constexpr, PLAIN: tl.constexpr, EARLY: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr,
    PDL: tl.constexpr, H: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = H * BLOCK_M
    item = tl.program_id(0)
    kv_head = tl.program_id(1) * H
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    if item >= tl.load(item_start + seqs):
        return
    # Most often every sequence has one split, so its place is the item's: one trip to memory and no search.
    seq = tl.minimum(item, seqs - 1)
    if (tl.load(item_start + seq) != item) | (tl.load(item_start + seq + 1) != item + 1):
        seq = find(item_start, seqs, item, 1)
    first_item = tl.load(item_start + seq)
    splits = tl.load(item_start + seq + 1) - first_item
    n_keys = tl.load(kv_len + seq)
    split = split_of(n_keys, SPLIT, MOST)
    start = (item - first_item) * split
    newest = start + split >= n_keys
    last = n_keys - 1
    stop = tl.minimum(last, start + split)
    if WINDOW:
        # No further back than the block of the oldest key: those before it may be another sequence's by now.
        start = tl.maximum(start, tl.maximum(n_keys - window, 0) // KEYS * KEYS)
    p_table = table + seq.to(tl.int64) * tl.load(table_width)
    block = _blocks(p_table, start, stop, SIZE, H, ASM)
    r = tl.arange(0, ROWS)
    lane = r % BLOCK_M
    head = (kv_head + r // BLOCK_M) * GROUP + lane
    row_ok = lane < GROUP
    h, d = tl.arange(0, H), tl.arange(0, WIDE)
    d_ok = d < DIM
    token = tl.load(query_start + seq).to(tl.int64)
    row = token * HEADS
    if ROTATE:
        i = tl.arange(0, DIM // 2)
        sin, cos = sin_cos(tl.load(positions + token).to(tl.float32) * tl.load(freq + i))
        sin, cos = sin[None, :], cos[None, :]
        slot = tl.load(slots + token).to(tl.int64)
    else:
        slot = tl.load(p_table + last // SIZE).to(tl.int64) * SIZE + last % SIZE
    new_row = cache_row(slot, kv_head, KV_HEADS, SIZE) + h * SIZE
    to = new_row[:, None] * DIM + d[None, :]  # [H, WIDE]
    if ASM and EARLY:  # the first two tiles, while the queries are not there yet
        _ask(keys, block, kv_head, start, KV_HEADS, SIZE, DIM, WIDE, KEYS, H)
        _ask(values, block, kv_head, start, KV_HEADS, SIZE, DIM, WIDE, KEYS, H)
        if start + KEYS < stop:
            second = _blocks(p_table, start + KEYS, stop, SIZE, H, ASM)
            _ask(keys, second, kv_head, start + KEYS, KV_HEADS, SIZE, DIM, WIDE, KEYS, H)
            _ask(values, second, kv_head, start + KEYS, KV_HEADS, SIZE, DIM, WIDE, KEYS, H)
    # What is above comes with the step, before its first kernel, or from earlier steps.
    if PDL and EARLY:
        tl.extra.cuda.gdc_wait()
    if ROTATE:
        b_q = rotated(q, (row + head) * DIM, row_ok, sin, cos, q_magnitude, q, NEOX, ROWS, DIM // 2)
        at = (token * KV_HEADS + kv_head + h) * DIM
        b_new = rotated(k, at, h < H, sin, cos, k_magnitude, keys, NEOX, H, DIM // 2)
        v_new = tl.load(v + at[:, None] + d[None, :]).to(values.dtype.element_ty)
        if newest:
            tl.store(keys + to, b_new)
            tl.store(values + to, v_new)
    else:
        mask_q = row_ok[:, None] & d_ok[None, :]
        b_q = tl.load(q + (row + head)[:, None] * DIM + d[None, :], mask=mask_q, other=0.0)
        b_new = as_values(tl.load(keys + to, mask=d_ok[None, :], other=0), KIND, COMPUTE)
        v_new = as_values(tl.load(values + to, mask=d_ok[None, :], other=0), KIND, COMPUTE)
    b_q = tl.reshape(b_q.to(COMPUTE), (H, BLOCK_M, WIDE))
    factor = scale
    own = tl.sum(b_q.to(tl.float32) * b_new.to(tl.float32)[:, None, :], 2)  # [H, BLOCK_M]
    v_new = v_new.to(tl.float32)
    if KIND != "plain":
        own = own * tl.load(k_scales + new_row)[:, None]
        v_new = v_new * tl.load(v_scales + new_row)[:, None]
    if CAP:
        own, factor = tanh(own * (scale / cap)), cap * _LOG2E
    # The new key begins the sums of the split that it belongs to.
    top = tl.where(newest, own * factor, float("-inf"))
    total = tl.where(newest, tl.full([H, BLOCK_M], 1.0, tl.float32), 0.0)
    acc = tl.broadcast_to(tl.where(newest, v_new, 0.0)[:, None, :], (H, BLOCK_M, WIDE))
    whole = start + tl.maximum(stop - start, 0) // KEYS * KEYS
    for begin in tl.range(start, whole, KEYS, num_stages=STAGES):
        coming = _blocks(p_table, begin + KEYS, stop, SIZE, H, ASM)
        b_k, b_v, k_scale, v_scale = _tile(
            keys, values, k_scales, v_scales, block, kv_head, begin, stop, KV_HEADS, DIM, WIDE, SIZE, False, H, KEYS, KIND
        )
        acc, top, total = _take(
            acc, top, total, b_q, b_k, b_v, k_scale, v_scale, begin, stop, last, scale, cap, window, WINDOW, CAP, False,
            KEYS, KIND, COMPUTE,
        )  # fmt: skip
        block = coming
    if whole < stop:
        b_k, b_v, k_scale, v_scale = _tile(
            keys, values, k_scales, v_scales, block, kv_head, whole, stop, KV_HEADS, DIM, WIDE, SIZE, True, H, KEYS, KIND
        )
        acc, top, total = _take(
            acc, top, total, b_q, b_k, b_v, k_scale, v_scale, whole, stop, last, scale, cap, window, WINDOW, CAP, True,
            KEYS, KIND, COMPUTE,
        )  # fmt: skip
    acc = tl.reshape(acc, (ROWS, WIDE))
    top, total = tl.reshape(top, (ROWS,)), tl.reshape(total, (ROWS,))
    finish(
        out, halved, part, top_sum, arrived, acc, top, total, sinks, item, seq, first_item, splits, kv_head, token, head,
        row_ok, HEADS, KV_HEADS, DIM, WIDE, SINKS, SHARE, ROWS, AT_ONCE, STAGES, HALVED, PLAIN, H,
    )  # fmt: skip
