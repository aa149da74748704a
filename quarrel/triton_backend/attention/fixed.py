"""Attention whose rows have the same bits in every step (`deterministic`): keys are split at fixed places.

Sums begin anew at every SPLIT-th key of a sequence and are added in order, whoever computes them: a program for each split
of a sequence with one new token, or one program for all splits of a tile of queries. Tiles, and so products of the matrix
units, are the same in both, and what a tile masks adds nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.attention.decode import find, oldest_key
from quarrel.triton_backend.attention.walk import load_queries, store_rows, tile_at, walk

SPLIT = 512
"""Keys from one beginning of the sums to the next."""
_AT_ONCE: tl.constexpr = tl.constexpr(8)
"""Splits whose sums are on their way together."""


@triton.jit
def _added(sums, part):
    """Sums so far and those of the next split; a split of which a row sees no key changes nothing."""
    acc, top, total = sums
    next_acc, next_top, next_total = part
    new_top = tl.maximum(top, next_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade = tl.exp2(top - base)
    share = tl.exp2(next_top - base)
    # Spelled out, as compilers choose which product of a sum they fuse.
    acc = tl.fma(next_acc, tl.broadcast_to(share[:, None], next_acc.shape), acc * fade[:, None])
    total = tl.fma(next_total, share, total * fade)
    return acc, new_top, total


@triton.jit
def _nothing(ROWS: tl.constexpr, WIDE: tl.constexpr):
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return tl.zeros([ROWS, WIDE], tl.float32), top, tl.zeros([ROWS], tl.float32)


@triton.jit
def _split(
    b_q, cache, p_table, kv_head, position, see, begin, first, middle, diagonal, last, oldest, n_keys, score,
    S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The sums of the split that begins there: tiles that a window's edge cuts, whole ones, and those of the diagonal."""
    stop = tl.minimum(begin + SPLIT, last)
    part = _nothing(BLOCK_M, S.WIDE)
    if S.WINDOW:
        part = walk(
            part, b_q, cache, p_table, kv_head, position, see, tl.maximum(first, begin), tl.minimum(middle, stop), oldest,
            n_keys, score, S, BLOCK_N, True, COMPUTE,
        )  # fmt: skip
    part = walk(
        part, b_q, cache, p_table, kv_head, position, see, tl.maximum(middle, begin), tl.minimum(diagonal, stop), oldest,
        n_keys, score, S, BLOCK_N, False, COMPUTE,
    )  # fmt: skip
    return walk(
        part, b_q, cache, p_table, kv_head, position, see, tl.maximum(tl.maximum(diagonal, middle), begin), stop, oldest,
        n_keys, score, S, BLOCK_N, True, COMPUTE,
    )  # fmt: skip


@triton.jit
def _borders(near, queries, score, S: tl.constexpr, BLOCK_N: tl.constexpr):
    """For queries from position `near` on: the oldest key that one sees, its tile, and where whole tiles begin and end."""
    oldest = near * 0
    first = oldest
    middle = oldest
    diagonal = (near + 1) // BLOCK_N * BLOCK_N
    if S.WINDOW:
        oldest = oldest_key(near, score.window, S.CHUNKED)
        first = oldest // BLOCK_N * BLOCK_N
        middle = (oldest_key(near + queries - 1, score.window, S.CHUNKED) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        middle = tl.minimum(tl.maximum(middle, first), tl.maximum(diagonal, first))
    return oldest, first, middle, diagonal


@triton.jit(do_not_specialize=["seqs", "least"])
def attend_fixed_many(
    out, q, cache, sinks, see_to, sequences, seqs, least, score, S: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sequences with `least` new tokens or more. Grid and arguments as those of `paged.attend_many`."""
    QUERIES: tl.constexpr = BLOCK_M // S.SHARE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # The last queries have the most keys: they begin first.
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, begin, n_new, tile = tile_at(sequences, seqs, item, QUERIES)
    if (n_new < least) | (tile * QUERIES >= n_new):
        return
    b_q, row, head, row_ok, position, see, near, last, n_keys, p_table = load_queries(
        q, see_to, sequences, seq, begin, n_new, tile, kv_head, S, BLOCK_M, COMPUTE
    )
    oldest, first, middle, diagonal = _borders(near, QUERIES, score, S, BLOCK_N)
    acc, top, total = _nothing(BLOCK_M, S.WIDE)
    for at in range(first // SPLIT * SPLIT, last, SPLIT):
        part = _split(
            b_q, cache, p_table, kv_head, position, see, at, first, middle, diagonal, last, oldest, n_keys, score, S,
            BLOCK_M, BLOCK_N, SPLIT, COMPUTE,
        )  # fmt: skip
        acc, top, total = _added((acc, top, total), part)
    store_rows(out, (acc, top, total), sinks, row, head, row_ok, S)


@triton.jit(do_not_specialize=["seqs"])
def attend_fixed_one(
    out, partial, q, cache, sinks, see_to, sequences, item_start, seqs, score, S: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sequences with one new token: a program takes a split of one's keys, for one key head; the last to arrive adds them.

    Grid (items, n_kv). Arguments as those of `decode.attend_one` and `paged.attend_many`; a tile is a prompt's, and has the
    heads of one query.
    """
    GROUP: tl.constexpr = S.HEADS // S.KV_HEADS
    SHARE: tl.constexpr = S.SHARE
    WIDE: tl.constexpr = S.WIDE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find(item_start, seqs, item, 1)
    first_item = tl.load(item_start + seq)
    splits = tl.load(item_start + seq + 1) - first_item
    if item - first_item >= splits:
        return
    token = tl.load(sequences.query_start + seq).to(tl.int64)
    n_keys = tl.load(sequences.kv_len + seq)
    lane = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + lane % SHARE
    row_ok = lane < GROUP
    near = n_keys - 1
    position = near + lane // SHARE  # [BLOCK_M]
    d = tl.arange(0, WIDE)
    row = token * S.HEADS + head  # [BLOCK_M]
    b_q = tl.load(q + row[:, None] * S.DIM + d[None, :], mask=row_ok[:, None] & (d < S.DIM)[None, :], other=0.0).to(COMPUTE)
    p_table = sequences.table + seq.to(tl.int64) * tl.load(sequences.table_width)
    see = position
    if S.SPANS:
        see = tl.load(see_to + token + lane * 0)
    oldest, first, middle, diagonal = _borders(near, 1, score, S, BLOCK_N)
    acc, top, total = _split(
        b_q, cache, p_table, kv_head, position, see, (item - first_item) * SPLIT, first, middle, diagonal, n_keys, oldest,
        n_keys, score, S, BLOCK_M, BLOCK_N, SPLIT, COMPUTE,
    )  # fmt: skip
    if splits == 1:
        store_rows(out, (acc, top, total), sinks, row, head, row_ok, S)
    else:
        place = item.to(tl.int64) * S.HEADS + head
        mask = row_ok[:, None] & (d < S.DIM)[None, :]
        tl.store(partial.sums + place[:, None] * S.DIM + d[None, :], acc, mask=mask)
        tl.store(partial.top_sum + place * 2, top, mask=row_ok)
        tl.store(partial.top_sum + place * 2 + 1, total, mask=row_ok)
        tl.debug_barrier()
        p_arrived = partial.arrived + seq * S.KV_HEADS + kv_head
        if tl.atomic_add(p_arrived, 1, sem="acq_rel") == splits - 1:
            tl.store(p_arrived, 0)
            _finish(out, partial, sinks, first_item, splits, kv_head * GROUP, token, first // SPLIT, S)


@triton.jit
def _finish(out, partial, sinks, first_item, splits, first_head, token, start, S: tl.constexpr):
    """Adds the splits of a key head's queries in order, from the first that they see on."""
    SHARE: tl.constexpr = S.SHARE
    lane = tl.arange(0, SHARE)
    head = first_head + lane
    row_ok = lane < S.HEADS // S.KV_HEADS
    d = tl.arange(0, S.WIDE)
    mask = row_ok[:, None] & (d < S.DIM)[None, :]
    acc, top, total = _nothing(SHARE, S.WIDE)
    for begin in range(start, splits, _AT_ONCE):
        for i in tl.static_range(_AT_ONCE):
            there = row_ok & (lane * 0 + begin + i < splits)
            place = (first_item + begin + i).to(tl.int64) * S.HEADS + head
            p_top = partial.top_sum + place * 2
            next_top = tl.load(p_top, mask=there, other=float("-inf"), cache_modifier=".cg")
            next_total = tl.load(p_top + 1, mask=there, other=0.0, cache_modifier=".cg")
            p = partial.sums + place[:, None] * S.DIM + d[None, :]
            next_acc = tl.load(p, mask=mask & there[:, None], other=0.0, cache_modifier=".cg")
            acc, top, total = _added((acc, top, total), (next_acc, next_top, next_total))
    store_rows(out, (acc, top, total), sinks, token * S.HEADS + head, head, row_ok, S)
