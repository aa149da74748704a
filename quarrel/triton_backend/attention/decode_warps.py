"""Attention of many sequences with one new token each, or of many keys: each warp walks keys of its own.

A program has H key heads and as many warps. A batched product gives each warp KEYS keys of one head at a time, which lie in
one block, so no warp waits for another's maximum or sum: the softmax stays in its registers. Whole tiles are copied to
shared memory STAGES - 1 ahead of their turn, the numbers of their blocks are loaded a tile earlier still, and the loop
masks nothing but what a window cuts and what lies beyond a head of no power of two. Splits, the new key and the sums of
splits are those of `attend_one`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.attention.decode import LOG2E, find, finish, oldest_key, rotated
from quarrel.triton_backend.attention.kv_codes import as_values
from quarrel.triton_backend.attention.rope import cache_row, sin_cos
from quarrel.triton_backend.attention.splits import split_of
from quarrel.triton_backend.elementwise.activation import tanh
from quarrel.triton_backend.runtime.launch import INTERPRETED

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_ASM: tl.constexpr = tl.constexpr(not INTERPRETED)


@triton.jit
def _blocks(p_table, key, stop, SIZE: tl.constexpr, H: tl.constexpr):
    """The block of a tile's keys, for each head [H]; beyond `stop` that of the last one. In assembly, as Triton's
    pipeline would copy what `tl.load` reads to shared memory, and wait there for all keys on their way, in each tile."""
    key = tl.minimum(key + tl.arange(0, H) * 0, tl.maximum(stop - 1, 0))
    p = p_table + key // SIZE
    if _ASM:
        found = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [p.to(tl.int64)], tl.int32, True, 1)
    else:
        found = tl.load(p)
    return found.to(tl.int64)


@triton.jit
def _prefetch(x, block, kv_head, begin, S: tl.constexpr, W: tl.constexpr):
    """Prefetches a tile into L2, in lines of 128 bytes; a tile that is cut short may be prefetched whole."""
    H: tl.constexpr = W.heads
    KEYS: tl.constexpr = W.keys
    BITS: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (KEYS * S.DIM * BITS + 1023) // 1024
    h = tl.arange(0, H)
    at = ((block * S.KV_HEADS + kv_head + h) * S.SIZE + begin % S.SIZE) * (S.DIM * BITS // 8)
    # A power of two of them: the last is prefetched again where a head is no power of two.
    line = tl.minimum(tl.arange(0, KEYS * S.WIDE * BITS // 1024), LINES - 1)
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
def _tile(cache, block, kv_head, begin, oldest, stop, S: tl.constexpr, W: tl.constexpr, MASK: tl.constexpr):
    """Keys and values of a tile, [H, KEYS, WIDE] each, and the scales of codes [H, KEYS]. MASK: zeros from `stop` on. With
    a window zeros before `oldest`: those rows may be another sequence's by now."""
    H: tl.constexpr = W.heads
    KEYS: tl.constexpr = W.keys
    h, n, d = tl.arange(0, H), tl.arange(0, KEYS), tl.arange(0, S.WIDE)
    row = ((block * S.KV_HEADS + kv_head + h) * S.SIZE + begin % S.SIZE)[:, None] + n[None, :]  # [H, KEYS]
    at = row[:, :, None] * S.DIM + d[None, None, :]
    seen = begin + n < stop
    if S.WINDOW:
        seen = (begin + n >= oldest) & (seen | (not MASK))
    ok = tl.broadcast_to(seen[None, :], (H, KEYS))
    k_scale = tl.zeros([H, KEYS], tl.float32)
    v_scale = k_scale
    if MASK or S.WINDOW:
        mask = ok[:, :, None] & (d < S.DIM)[None, None, :]
        b_k, b_v = tl.load(cache.k + at, mask=mask, other=0), tl.load(cache.v + at, mask=mask, other=0)
        if S.KIND != "plain":
            k_scale = tl.load(cache.k_scale + row, mask=ok, other=0.0)
            v_scale = tl.load(cache.v_scale + row, mask=ok, other=0.0)
    else:
        if S.DIM == S.WIDE:
            b_k, b_v = tl.load(cache.k + at), tl.load(cache.v + at)
        else:
            mask = (d < S.DIM)[None, None, :]
            b_k, b_v = tl.load(cache.k + at, mask=mask, other=0), tl.load(cache.v + at, mask=mask, other=0)
        if S.KIND != "plain":
            k_scale, v_scale = tl.load(cache.k_scale + row), tl.load(cache.v_scale + row)
    return b_k, b_v, k_scale, v_scale


@triton.jit
def _accumulate(
    sums, b_q, tile, begin, oldest, stop, score, S: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Adds a tile to sums [H, M, WIDE], maxima and totals [H, M]. MASK: keys from `stop` on are not there; with a window
    those before `oldest` neither."""
    KIND: tl.constexpr = S.KIND
    acc, top, total = sums
    b_k, b_v, k_scale, v_scale = tile
    key = (begin + tl.arange(0, KEYS))[None, None, :]
    products = tl.dot(b_q, tl.permute(_values(b_k, KIND, COMPUTE), (0, 2, 1)), input_precision="ieee")  # [H, M, KEYS]
    if KIND != "plain":
        if KIND == "fp8":
            k_scale, v_scale = k_scale * 0.00390625, v_scale * 0.00390625
        products = products * k_scale[:, None, :]
    # The scale is positive, so it may follow the maximum, where it is one operation with the difference.
    factor = score.scale
    if S.CAP:
        products, factor = tanh(products * (score.scale / score.cap)), score.cap * _LOG2E
    if MASK or S.WINDOW:
        if not MASK:
            seen = key >= oldest
        elif S.WINDOW:
            seen = (key < stop) & (key >= oldest)
        else:
            seen = key < stop
        products = tl.where(seen, products, float("-inf"))
    new_top = tl.maximum(top, tl.max(products, 2) * factor)
    base = new_top
    if MASK or S.WINDOW:
        # Where no key has been seen yet -inf stays; zero in its place leaves every power zero.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(products * factor - base[:, :, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(p, 2)
    if KIND != "plain":
        p = p * v_scale[:, None, :]
    acc = tl.dot(p.to(COMPUTE), _values(b_v, KIND, COMPUTE), acc * fade[:, :, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit(do_not_specialize=["seqs"])
def attend_warps(
    output, partial, q, rotation, cache, sinks, sequences, item_start, seqs, score,
    S: tl.constexpr, W: tl.constexpr, ROTATE: tl.constexpr, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr,
    FORM: tl.constexpr, EARLY: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of sequences with one new token; a program takes a split of one sequence's keys, for W.heads key heads.

    Grid (items, n_kv / W.heads), a warp for each of these heads. Arguments as `attend_one`'s, but W (`Warps`) says what a
    tile is.
    """
    GROUP: tl.constexpr = S.HEADS // S.KV_HEADS
    H: tl.constexpr = W.heads
    KEYS: tl.constexpr = W.keys
    ROWS: tl.constexpr = H * BLOCK_M
    DIM: tl.constexpr = S.DIM
    KV_HEADS: tl.constexpr = S.KV_HEADS
    WIDE: tl.constexpr = S.WIDE
    SIZE: tl.constexpr = S.SIZE
    KIND: tl.constexpr = S.KIND
    NEOX: tl.constexpr = ROTATE == "neox"
    STAGES: tl.constexpr = W.stages
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
    n_keys = tl.load(sequences.kv_len + seq)
    split = split_of(n_keys, splits)
    start = (item - first_item) * split
    newest = start + split >= n_keys
    last = n_keys - 1
    stop = tl.minimum(last, start + split)
    oldest = start
    if S.WINDOW:
        oldest = oldest_key(last, score.window, S.CHUNKED)
        start = tl.maximum(start, oldest // KEYS * KEYS)
    p_table = sequences.table + seq.to(tl.int64) * tl.load(sequences.table_width)
    block = _blocks(p_table, start, stop, SIZE, H)
    r = tl.arange(0, ROWS)
    lane = r % BLOCK_M
    head = (kv_head + r // BLOCK_M) * GROUP + lane
    row_ok = lane < GROUP
    h, d = tl.arange(0, H), tl.arange(0, WIDE)
    d_ok = d < DIM
    token = tl.load(sequences.query_start + seq).to(tl.int64)
    row = token * S.HEADS
    if ROTATE != "":
        i = tl.arange(0, DIM // 2)
        sin, cos = sin_cos(tl.load(rotation.positions + token).to(tl.float32) * tl.load(rotation.freq + i))
        sin, cos = sin[None, :], cos[None, :]
        slot = tl.load(rotation.slots + token).to(tl.int64)
    else:
        slot = tl.load(p_table + last // SIZE).to(tl.int64) * SIZE + last % SIZE
    new_row = cache_row(slot, kv_head, KV_HEADS, SIZE) + h * SIZE
    to = new_row[:, None] * DIM + d[None, :]  # [H, WIDE]
    if _ASM and EARLY:  # the first two tiles, while the queries are not there yet
        _prefetch(cache.k, block, kv_head, start, S, W)
        _prefetch(cache.v, block, kv_head, start, S, W)
        if start + KEYS < stop:
            second = _blocks(p_table, start + KEYS, stop, SIZE, H)
            _prefetch(cache.k, second, kv_head, start + KEYS, S, W)
            _prefetch(cache.v, second, kv_head, start + KEYS, S, W)
    # What is above comes with the step, before its first kernel, or from earlier steps.
    if PDL and EARLY:
        tl.extra.cuda.gdc_wait()
    if ROTATE != "":
        b_q = rotated(q, (row + head) * DIM, row_ok, sin, cos, rotation.q_magnitude, q, NEOX, ROWS, DIM // 2)
        at = (token * KV_HEADS + kv_head + h) * DIM
        b_new = rotated(rotation.k, at, h < H, sin, cos, rotation.k_magnitude, cache.k, NEOX, H, DIM // 2)
        v_new = tl.load(rotation.v + at[:, None] + d[None, :]).to(cache.v.dtype.element_ty)
        if newest:
            tl.store(cache.k + to, b_new)
            tl.store(cache.v + to, v_new)
    else:
        mask_q = row_ok[:, None] & d_ok[None, :]
        b_q = tl.load(q + (row + head)[:, None] * DIM + d[None, :], mask=mask_q, other=0.0)
        b_new = as_values(tl.load(cache.k + to, mask=d_ok[None, :], other=0), KIND, COMPUTE)
        v_new = as_values(tl.load(cache.v + to, mask=d_ok[None, :], other=0), KIND, COMPUTE)
    b_q = tl.reshape(b_q.to(COMPUTE), (H, BLOCK_M, WIDE))
    factor = score.scale
    own = tl.sum(b_q.to(tl.float32) * b_new.to(tl.float32)[:, None, :], 2)  # [H, BLOCK_M]
    v_new = v_new.to(tl.float32)
    if KIND != "plain":
        own = own * tl.load(cache.k_scale + new_row)[:, None]
        v_new = v_new * tl.load(cache.v_scale + new_row)[:, None]
    if S.CAP:
        own, factor = tanh(own * (score.scale / score.cap)), score.cap * _LOG2E
    # The new key begins the sums of the split that it belongs to.
    top = tl.where(newest, own * factor, float("-inf"))
    total = tl.where(newest, tl.full([H, BLOCK_M], 1.0, tl.float32), 0.0)
    acc = tl.broadcast_to(tl.where(newest, v_new, 0.0)[:, None, :], (H, BLOCK_M, WIDE))
    whole = start + tl.maximum(stop - start, 0) // KEYS * KEYS
    for begin in tl.range(start, whole, KEYS, num_stages=STAGES):
        coming = _blocks(p_table, begin + KEYS, stop, SIZE, H)
        tile = _tile(cache, block, kv_head, begin, oldest, stop, S, W, False)
        acc, top, total = _accumulate((acc, top, total), b_q, tile, begin, oldest, stop, score, S, KEYS, False, COMPUTE)
        block = coming
    if whole < stop:
        tile = _tile(cache, block, kv_head, whole, oldest, stop, S, W, True)
        acc, top, total = _accumulate((acc, top, total), b_q, tile, whole, oldest, stop, score, S, KEYS, True, COMPUTE)
    sums = (tl.reshape(acc, (ROWS, WIDE)), tl.reshape(top, (ROWS,)), tl.reshape(total, (ROWS,)))
    finish(
        output, partial, sums, sinks, item, seq, first_item, splits, kv_head, token, head, row_ok, S,
        ROWS=ROWS, AT_ONCE=AT_ONCE, AHEAD=STAGES, FORM=FORM, H=H,
    )  # fmt: skip
