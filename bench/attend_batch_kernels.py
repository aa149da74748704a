"""Attention of sequences with one new token, each warp by itself: what `attend_batch.py` holds against `attend_one`.

A program has H key heads and cuts their keys into tiles of PARTS times KEYS; a batched product gives each warp KEYS keys of
one head, which lie in one block. So no warp waits for another's maximum or sum within the loop; the parts of a head meet
behind it. Whole tiles are copied to shared memory ahead of their turn, the numbers of their blocks are loaded a tile
earlier still. Arguments, splits, the new key and the sums of splits are those of `attend_one`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.attend_one import _LOG2E, _combine, _rotated, _split_of, _store_heads, find, sink
from quarrel.triton_backend.codes import as_values
from quarrel.triton_backend.elementwise import tanh
from quarrel.triton_backend.rope import cache_row, sin_cos


@triton.jit
def _blocks(
    p_table, begin, stop, SIZE: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr
):
    """The block of each warp's keys, [W]; beyond `stop` the last one. ASM, as Triton's pipeline would copy what `tl.load`
    reads to shared memory, and wait there for all keys on their way, in each tile."""
    key = tl.minimum(begin + tl.arange(0, W) % PARTS * KEYS, tl.maximum(stop - 1, 0))
    p = p_table + key // SIZE
    if ASM:
        found = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [p.to(tl.int64)], tl.int32, True, 1)
    else:
        found = tl.load(p)
    return found.to(tl.int64)


@triton.jit
def _ask(x, block, kv_head, begin, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr,
         KEYS: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """Asks the second level for a tile, LINES of 128 bytes a warp; a tile that is cut short may be asked for whole."""
    w = tl.arange(0, W)
    row = (block * KV_HEADS + kv_head + w // PARTS) * SIZE + (begin + w % PARTS * KEYS) % SIZE
    at = row * (LINES * 128 // KEYS)
    where = x.to(tl.int64) + at[:, None] + tl.arange(0, LINES)[None, :] * 128
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
    WIDE: tl.constexpr, SIZE: tl.constexpr, MASK: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Keys and values of a tile, [W, KEYS, WIDE] each, and the scales of codes [W, KEYS]. MASK: zeros from `stop` on."""
    w, n, d = tl.arange(0, W), tl.arange(0, KEYS), tl.arange(0, WIDE)
    key = (begin + w % PARTS * KEYS)[:, None] + n[None, :]  # [W, KEYS]
    row = ((block * KV_HEADS + kv_head + w // PARTS) * SIZE + (begin + w % PARTS * KEYS) % SIZE)[:, None] + n[None, :]
    at = row[:, :, None] * DIM + d[None, None, :]
    ok = key < stop
    k_scale = tl.zeros([W, KEYS], tl.float32)
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
    CAP: tl.constexpr, MASK: tl.constexpr, HIDE: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Takes in a tile: sums [W, M, WIDE], maxima and totals [W, M]. MASK: keys from `stop` on are not there; HIDE: values
    were loaded there all the same, and may be anything."""
    key = (begin + tl.arange(0, W) % PARTS * KEYS)[:, None] + tl.arange(0, KEYS)[None, :]
    seen = key < stop
    score = tl.dot(b_q, tl.permute(_values(b_k, KIND, COMPUTE), (0, 2, 1)), input_precision="ieee")  # [W, M, KEYS]
    if KIND != "plain":
        if KIND == "fp8":
            k_scale, v_scale = k_scale * 0.00390625, v_scale * 0.00390625
        if HIDE:
            v_scale = tl.where(seen, v_scale, 0.0)
        score = score * k_scale[:, None, :]
    # The scale is positive, so it may follow the maximum, where it is one operation with the difference.
    factor = scale
    if CAP:
        score, factor = tanh(score * (scale / cap)), cap * _LOG2E
    b_v = _values(b_v, KIND, COMPUTE)
    if HIDE:
        b_v = tl.where(seen[:, :, None], b_v, 0.0)
    if WINDOW:
        seen = seen & (last - key < window)
    if MASK or WINDOW:
        score = tl.where(seen[:, None, :], score, float("-inf"))
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
    acc = tl.dot(p.to(COMPUTE), b_v, acc * fade[:, :, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit(do_not_specialize=["seqs"])
def attend_warps(
    out, halved, part, top_sum, arrived, q, k, v, positions, freq, slots, q_magnitude, k_magnitude, keys, values, k_scales,
    v_scales, sinks, query_start, kv_len, table, table_width, item_start, seqs, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, ROTATE: tl.constexpr, NEOX: tl.constexpr,
    SHARE: tl.constexpr, BLOCK_M: tl.constexpr, SHORTEST: tl.constexpr, MOST: tl.constexpr, AT_ONCE: tl.constexpr,
    HALVED: tl.constexpr, PLAIN: tl.constexpr, EARLY: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr,
    PDL: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, ASK: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """ASK: the first tile is on its way to the second level while the queries are not there yet. TAIL, the tile that is not
    whole: "last"; "first", loaded before the queries are there; "through", copied ahead like the others, and all masked."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    W: tl.constexpr = H * PARTS
    ROWS: tl.constexpr = H * BLOCK_M
    TILE: tl.constexpr = PARTS * KEYS
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
    split = _split_of(n_keys, SHORTEST, MOST)
    start = (item - first_item) * split
    newest = start + split >= n_keys
    stop = tl.minimum(n_keys - 1, start + split)
    last = n_keys - 1
    if WINDOW:
        # No further back than the block of the oldest key: those before it may be another sequence's by now.
        start = tl.maximum(start, tl.maximum(n_keys - window, 0) // KEYS * KEYS)
    p_table = table + seq.to(tl.int64) * tl.load(table_width)
    block = _blocks(p_table, start, stop, SIZE, PARTS, KEYS, W, ASM)
    whole = start + tl.maximum(stop - start, 0) // TILE * TILE
    if TAIL == "first":
        t_block = _blocks(p_table, whole, stop, SIZE, PARTS, KEYS, W, ASM)
        t_k, t_v, t_k_scale, t_v_scale = _tile(
            keys, values, k_scales, v_scales, t_block, kv_head, whole, stop, KV_HEADS, DIM, WIDE, SIZE, True, PARTS, KEYS,
            W, KIND,
        )  # fmt: skip
    r = tl.arange(0, ROWS)
    lane = r % BLOCK_M
    head = (kv_head + r // BLOCK_M) * GROUP + lane
    row_ok = lane < GROUP
    d = tl.arange(0, WIDE)
    d_ok = d < DIM
    h = tl.arange(0, H)
    token = tl.load(query_start + seq).to(tl.int64)
    row = token * HEADS
    if ROTATE:
        i = tl.arange(0, DIM // 2)
        sin, cos = sin_cos(tl.load(positions + token).to(tl.float32) * tl.load(freq + i))
        sin, cos = sin[None, :], cos[None, :]
        new_row = cache_row(tl.load(slots + token).to(tl.int64), kv_head, KV_HEADS, SIZE) + h * SIZE
    else:
        slot = tl.load(p_table + last // SIZE).to(tl.int64) * SIZE + last % SIZE
        new_row = cache_row(slot, kv_head, KV_HEADS, SIZE) + h * SIZE
    to = new_row[:, None] * DIM + d[None, :]  # [H, WIDE]
    if ASK and ASM and EARLY:
        LINES: tl.constexpr = KEYS * DIM * keys.dtype.element_ty.primitive_bitwidth // 1024
        _ask(keys, block, kv_head, start, KV_HEADS, SIZE, LINES, PARTS, KEYS, W)
        _ask(values, block, kv_head, start, KV_HEADS, SIZE, LINES, PARTS, KEYS, W)
    # What is above comes with the step, before its first kernel, or from earlier steps.
    if PDL and EARLY:
        tl.extra.cuda.gdc_wait()
    if ROTATE:
        b_q = _rotated(q, (row + head) * DIM, row_ok, sin, cos, q_magnitude, q, NEOX, ROWS, DIM // 2)
        at = (token * KV_HEADS + kv_head + h) * DIM
        b_new = _rotated(k, at, h < H, sin, cos, k_magnitude, keys, NEOX, H, DIM // 2)
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
    # The new key begins the sums of each head's first part.
    there = newest & (tl.arange(0, PARTS) == 0)[None, :, None]  # [1, PARTS, 1]
    top = tl.where(there, (own * factor)[:, None, :], float("-inf"))
    total = tl.where(there, tl.full([H, PARTS, BLOCK_M], 1.0, tl.float32), 0.0)
    top, total = tl.reshape(top, (W, BLOCK_M)), tl.reshape(total, (W, BLOCK_M))
    begun = tl.where(there, v_new[:, None, :], 0.0)  # [H, PARTS, WIDE]
    acc = tl.broadcast_to(tl.reshape(begun, (W, 1, WIDE)), (W, BLOCK_M, WIDE))
    every = tl.reshape(tl.broadcast_to(b_q[:, None, :, :], (H, PARTS, BLOCK_M, WIDE)), (W, BLOCK_M, WIDE))
    if TAIL == "first":
        acc, top, total = _take(
            acc, top, total, every, t_k, t_v, t_k_scale, t_v_scale, whole, stop, last, scale, cap, window, WINDOW, CAP,
            True, False, PARTS, KEYS, W, KIND, COMPUTE,
        )  # fmt: skip
    THROUGH: tl.constexpr = TAIL == "through"
    end = tl.maximum(stop, start) if THROUGH else whole
    for begin in tl.range(start, end, TILE, num_stages=STAGES):
        coming = _blocks(p_table, begin + TILE, stop, SIZE, PARTS, KEYS, W, ASM)
        b_k, b_v, k_scale, v_scale = _tile(
            keys, values, k_scales, v_scales, block, kv_head, begin, stop, KV_HEADS, DIM, WIDE, SIZE, False, PARTS, KEYS, W,
            KIND,
        )  # fmt: skip
        acc, top, total = _take(
            acc, top, total, every, b_k, b_v, k_scale, v_scale, begin, stop, last, scale, cap, window, WINDOW, CAP, THROUGH,
            THROUGH, PARTS, KEYS, W, KIND, COMPUTE,
        )  # fmt: skip
        block = coming
    if TAIL == "last":  # noqa: SIM102 (this is known as the kernel is compiled, the other is not)
        if whole < stop:
            t_k, t_v, t_k_scale, t_v_scale = _tile(
                keys, values, k_scales, v_scales, block, kv_head, whole, stop, KV_HEADS, DIM, WIDE, SIZE, True, PARTS, KEYS,
                W, KIND,
            )  # fmt: skip
            acc, top, total = _take(
                acc, top, total, every, t_k, t_v, t_k_scale, t_v_scale, whole, stop, last, scale, cap, window, WINDOW, CAP,
                True, False, PARTS, KEYS, W, KIND, COMPUTE,
            )  # fmt: skip
    # The parts of each head become one.
    tops = tl.reshape(top, (H, PARTS, BLOCK_M))
    most = tl.max(tops, 1)
    base = tl.where(most == float("-inf"), 0.0, most)
    weight = tl.exp2(tops - base[:, None, :])
    total = tl.reshape(tl.sum(tl.reshape(total, (H, PARTS, BLOCK_M)) * weight, 1), (ROWS,))
    acc = tl.sum(tl.reshape(acc, (H, PARTS, BLOCK_M, WIDE)) * weight[:, :, :, None], 1)
    acc, top = tl.reshape(acc, (ROWS, WIDE)), tl.reshape(most, (ROWS,))
    p_out = out + row * DIM
    if splits == 1:
        if SINKS:
            acc, total = sink(acc, top, total, sinks, head, row_ok)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        _store_heads(p_out, halved, acc, head, row_ok, HEADS, DIM, WIDE, ROWS, HALVED, PLAIN)
    else:
        mask = row_ok[:, None] & d_ok[None, :]
        place = item.to(tl.int64) * HEADS + head
        tl.store(part + place[:, None] * DIM + d[None, :], acc, mask=mask)
        tl.store(top_sum + place * 2, top, mask=row_ok)
        tl.store(top_sum + place * 2 + 1, total, mask=row_ok)
        tl.debug_barrier()
        if tl.atomic_add(arrived + seq * KV_HEADS + kv_head, 1, sem="acq_rel") == splits - 1:
            tl.store(arrived + seq * KV_HEADS + kv_head, 0)
            for one in range(H):
                _combine(
                    p_out, halved, part, top_sum, sinks, first_item, splits, (kv_head + one) * GROUP, GROUP, HEADS, DIM,
                    WIDE, SINKS, SHARE, MOST, AT_ONCE, HALVED, PLAIN,
                )  # fmt: skip
