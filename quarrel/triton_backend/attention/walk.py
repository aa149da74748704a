"""A tile of queries and of the heads that share a key head, which stay in one program: where it is, its walk along the keys
of its sequence, and where its result goes."""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.triton_backend.attention.decode import LOG2E, find, oldest_key, sink
from quarrel.triton_backend.attention.kv_codes import as_values
from quarrel.triton_backend.elementwise.activation import tanh

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)


@triton.jit
def tile_at(sequences, seqs, item, QUERIES: tl.constexpr):
    """Of which sequence a tile is, its first row and its rows, and which of its tiles."""
    seq = find(sequences.query_start, seqs, item, QUERIES)
    begin = tl.load(sequences.query_start + seq)
    n_new = tl.load(sequences.query_start + seq + 1) - begin
    return seq, begin, n_new, item - (begin // QUERIES + seq)


@triton.jit
def load_queries(
    q, see_to, sequences, seq, begin, n_new, tile, kv_head, S: tl.constexpr, BLOCK_M: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """Queries of a tile `[BLOCK_M, WIDE]`; of each row of it its number, its head, and whether it is one; its position and
    up to which it sees; the first position, the end of what the tile sees, the sequence's keys and its blocks."""
    GROUP: tl.constexpr = S.HEADS // S.KV_HEADS
    SHARE: tl.constexpr = S.SHARE
    QUERIES: tl.constexpr = BLOCK_M // SHARE
    n_keys = tl.load(sequences.kv_len + seq)
    lane = tl.arange(0, BLOCK_M)
    query = tile * QUERIES + lane // SHARE
    head = kv_head * GROUP + lane % SHARE
    row_ok = (query < n_new) & (lane % SHARE < GROUP)
    near = n_keys - n_new + tile * QUERIES
    position = near + lane // SHARE  # [BLOCK_M]
    d = tl.arange(0, S.WIDE)
    row = (begin + query).to(tl.int64) * S.HEADS + head  # [BLOCK_M]
    b_q = tl.load(q + row[:, None] * S.DIM + d[None, :], mask=row_ok[:, None] & (d < S.DIM)[None, :], other=0.0).to(COMPUTE)
    p_table = sequences.table + seq.to(tl.int64) * tl.load(sequences.table_width)
    last = tl.minimum(n_keys, near + QUERIES)
    see = position
    if S.SPANS:
        see = tl.load(see_to + begin + query, mask=row_ok, other=0)
        last = tl.minimum(n_keys, tl.max(see) + 1)
    return b_q, row, head, row_ok, position, see, near, last, n_keys, p_table


@triton.jit
def store_rows(out, sums, sinks, row, head, row_ok, S: tl.constexpr):
    """The sums of rows, each over its total and a sink."""
    acc, top, total = sums
    if S.SINKS:
        acc, total = sink(acc, top, total, sinks, head, row_ok)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    d = tl.arange(0, S.WIDE)
    mask = row_ok[:, None] & (d < S.DIM)[None, :]
    tl.store(out + row[:, None] * S.DIM + d[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def walk(
    sums, b_q, cache, p_table, kv_head, position, see, start, stop, oldest, n_keys, score, S: tl.constexpr,
    BLOCK_N: tl.constexpr, MASK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Adds keys start to stop; MASK for tiles of which some row sees only a part, and none a key before `oldest`."""
    acc, top, total = sums
    DIM: tl.constexpr = S.DIM
    SIZE: tl.constexpr = S.SIZE
    KIND: tl.constexpr = S.KIND
    d = tl.arange(0, S.WIDE)
    d_ok = d < DIM
    for begin in range(start, stop, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        p_block = p_table + key // SIZE
        if MASK:
            key_ok = key < n_keys
            if S.WINDOW:  # blocks behind it may be another sequence's by now
                key_ok = key_ok & (key >= oldest)
            block = tl.load(p_block, mask=key_ok, other=0).to(tl.int64)
        else:
            block = tl.load(p_block).to(tl.int64)
        at = (block * S.KV_HEADS + kv_head) * SIZE + key % SIZE  # [BLOCK_N]
        p_k, p_v = cache.k + at[:, None] * DIM + d[None, :], cache.v + at[:, None] * DIM + d[None, :]
        if MASK:
            b_k = tl.load(p_k, mask=key_ok[:, None] & d_ok[None, :], other=0)
        elif DIM == S.WIDE:
            b_k = tl.load(p_k)
        else:
            b_k = tl.load(p_k, mask=d_ok[None, :], other=0)
        products = tl.dot(b_q, tl.trans(as_values(b_k, KIND, COMPUTE)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if KIND != "plain":
            if MASK:
                k_scale = tl.load(cache.k_scale + at, mask=key_ok, other=0.0)
                v_scale = tl.load(cache.v_scale + at, mask=key_ok, other=0.0)
            else:
                k_scale, v_scale = tl.load(cache.k_scale + at), tl.load(cache.v_scale + at)
            products = products * k_scale[None, :]
        # The scale is positive, so it may follow the maximum, where it is one operation with the difference.
        factor = score.scale
        if S.CAP:
            products, factor = tanh(products * (score.scale / score.cap)), score.cap * _LOG2E
        if MASK:
            back = position[:, None] - key[None, :]
            if S.SPANS:
                seen = (see[:, None] >= key[None, :]) & key_ok[None, :]
            else:
                seen = (back >= 0) & key_ok[None, :]
            if S.WINDOW:
                if S.CHUNKED:
                    seen = seen & (key[None, :] >= oldest_key(position, score.window, True)[:, None])
                else:
                    seen = seen & (back < score.window)
            products = tl.where(seen, products, float("-inf"))
        new_top = tl.maximum(top, tl.max(products, 1) * factor)
        base = new_top
        if MASK:
            # A row that has seen no key yet keeps -inf; zero in its place leaves every power zero.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(products * factor - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        if MASK:
            b_v = tl.load(p_v, mask=key_ok[:, None] & d_ok[None, :], other=0)
        elif DIM == S.WIDE:
            b_v = tl.load(p_v)
        else:
            b_v = tl.load(p_v, mask=d_ok[None, :], other=0)
        if KIND != "plain":
            p = p * v_scale[None, :]
        acc = tl.dot(p.to(COMPUTE), as_values(b_v, KIND, COMPUTE), acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total
