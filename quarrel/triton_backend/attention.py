"""Attention over the paged cache: `attend_one` for sequences with one new token (decode), `attend_many` for the others.

A sequence with one new token is cut into splits of its keys that run side by side; the last program of a sequence and key
head to arrive combines them, always in order. Splits follow from the sequence's own length, so a row's result never depends
on the rest of the batch. One with more (prefill) walks all its keys in one program per tile of queries, masking only tiles
that the diagonal or the window's edge cuts; where a row's bits may not depend on its batch or on how its prompt is cut, all
sequences go this way. A tile has BLOCK_M rows: queries times the heads that share a key head. Softmax and sums are float32,
powers of two with log2(e) in the scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl

from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Array, Compute
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.elementwise import tanh
from quarrel.triton_backend.halved import store_halved
from quarrel.triton_backend.runtime import Launch, Live, Site, cdiv, power_of_two, starts_early

LEAST_SPLIT, MOST_SPLITS = 64, 64
MAX_HEAD_DIM = 256

LOG2E = 1.4426950408889634
_LOG2E: tl.constexpr = tl.constexpr(LOG2E)


def splits_of(kv_len: Array, shortest: int = LEAST_SPLIT, most: int = MOST_SPLITS) -> Array:
    """How many splits a sequence with one new token has, up to MOST_SPLITS: each LEAST_SPLIT keys or 2, 4, 8 times that."""
    least = -(-kv_len // most)
    split = np.maximum(shortest, 1 << np.frexp(np.maximum(least - 1, 0).astype(np.float64))[1].astype(np.int64))
    return -(-kv_len // split)


def most_splits(keys: int, seqs: int) -> int:
    """Splits of so many sequences that hold so many keys in all."""
    return min(cdiv(keys, LEAST_SPLIT) + seqs, MOST_SPLITS * seqs)


@dataclass(frozen=True)
class Tile:
    """`rows` of queries and heads by `keys`."""

    rows: int
    keys: int
    warps: int
    stages: int


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
def _split_of(n_keys, SHORTEST: tl.constexpr, MOST: tl.constexpr):
    """Keys of a split: `splits_of` in the kernel."""
    least = (n_keys + MOST - 1) // MOST
    split = n_keys * 0 + SHORTEST
    while split < least:
        split *= 2
    return split


@triton.jit
def _walk(
    acc, top, total, b_q, keys, values, p_table, kv_head, position, start, stop, n_keys, scale, cap, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, MASK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Takes in keys start to stop; MASK for tiles of which some row sees only a part."""
    d = tl.arange(0, WIDE)
    d_ok = d < DIM
    for begin in range(start, stop, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        p_block = p_table + key // SIZE
        if MASK:
            key_ok = key < n_keys
            block = tl.load(p_block, mask=key_ok, other=0).to(tl.int64)
        else:
            block = tl.load(p_block).to(tl.int64)
        at = (block * KV_HEADS + kv_head) * (SIZE * DIM) + key % SIZE * DIM  # [BLOCK_N]
        p_k, p_v = keys + at[:, None] + d[None, :], values + at[:, None] + d[None, :]
        if MASK:
            b_k = tl.load(p_k, mask=key_ok[:, None] & d_ok[None, :], other=0.0)
        elif DIM == WIDE:
            b_k = tl.load(p_k)
        else:
            b_k = tl.load(p_k, mask=d_ok[None, :], other=0.0)
        score = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        # The scale is positive, so it may follow the maximum, where it is one operation with the difference.
        factor = scale
        if CAP:
            score, factor = tanh(score * (scale / cap)), cap * _LOG2E
        if MASK:
            back = position[:, None] - key[None, :]
            seen = (back >= 0) & key_ok[None, :]
            if WINDOW:
                seen = seen & (back < window)
            score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * factor)
        base = new_top
        if MASK:
            # A row that has seen no key yet keeps -inf; zero in its place leaves every power zero.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(score * factor - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        if MASK:
            b_v = tl.load(p_v, mask=key_ok[:, None] & d_ok[None, :], other=0.0)
        elif DIM == WIDE:
            b_v = tl.load(p_v)
        else:
            b_v = tl.load(p_v, mask=d_ok[None, :], other=0.0)
        acc = tl.dot(p.to(values.dtype.element_ty), b_v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _sink(acc, top, total, sinks, head, ok):
    """Adds a sink's share to the sum."""
    sink = tl.load(sinks + head, mask=ok, other=0.0) * _LOG2E
    new_top = tl.maximum(top, sink)
    fade = tl.exp2(top - new_top)
    return acc * fade[:, None], total * fade + tl.exp2(sink - new_top)


@triton.jit(do_not_specialize=["seqs"])
def attend_many(
    out, q, keys, values, sinks, query_start, kv_len, table, table_width, seqs, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LEAST: tl.constexpr = 2,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = BLOCK_M // SHARE
    # The last queries have the most keys: they begin first.
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find(query_start, seqs, item, QUERIES)
    begin = tl.load(query_start + seq)
    n_new = tl.load(query_start + seq + 1) - begin
    tile = item - (begin // QUERIES + seq)
    if (n_new < LEAST) | (tile * QUERIES >= n_new):
        return
    n_keys = tl.load(kv_len + seq)
    lane = tl.arange(0, BLOCK_M)
    query = tile * QUERIES + lane // SHARE
    head = kv_head * GROUP + lane % SHARE
    row_ok = (query < n_new) & (lane % SHARE < GROUP)
    oldest = n_keys - n_new + tile * QUERIES  # the position of the tile's first query
    position = oldest + lane // SHARE  # [BLOCK_M]
    d = tl.arange(0, WIDE)
    row = (begin + query).to(tl.int64) * HEADS + head  # [BLOCK_M]
    mask_q = row_ok[:, None] & (d < DIM)[None, :]
    b_q = tl.load(q + row[:, None] * DIM + d[None, :], mask=mask_q, other=0.0).to(keys.dtype.element_ty)
    p_table = table + seq.to(tl.int64) * tl.load(table_width)
    acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    last = tl.minimum(n_keys, oldest + QUERIES)
    middle = oldest * 0
    diagonal = (oldest + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        # Tiles that begin before the last query's window are cut by its edge.
        first = tl.maximum(oldest - window + 1, 0) // BLOCK_N * BLOCK_N
        middle = tl.maximum(oldest + QUERIES - window + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        middle = tl.minimum(tl.maximum(middle, first), tl.maximum(diagonal, first))
        acc, top, total = _walk(
            acc, top, total, b_q, keys, values, p_table, kv_head, position, first, middle, n_keys, scale, cap, window,
            KV_HEADS, DIM, WIDE, SIZE, WINDOW, CAP, True, BLOCK_N,
        )  # fmt: skip
    acc, top, total = _walk(
        acc, top, total, b_q, keys, values, p_table, kv_head, position, middle, diagonal, n_keys, scale, cap, window,
        KV_HEADS, DIM, WIDE, SIZE, WINDOW, CAP, False, BLOCK_N,
    )  # fmt: skip
    acc, top, total = _walk(
        acc, top, total, b_q, keys, values, p_table, kv_head, position, tl.maximum(diagonal, middle), last, n_keys, scale,
        cap, window, KV_HEADS, DIM, WIDE, SIZE, WINDOW, CAP, True, BLOCK_N,
    )  # fmt: skip
    if SINKS:
        acc, total = _sink(acc, top, total, sinks, head, row_ok)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=mask_q)


@triton.jit(do_not_specialize=["seqs"])
def attend_one(
    out, halved, part, top_sum, arrived, q, keys, values, sinks, query_start, kv_len, table, table_width, item_start, seqs,
    scale, cap, window, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SHARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHORTEST: tl.constexpr, MOST: tl.constexpr, AT_ONCE: tl.constexpr,
    HALVED: tl.constexpr, PLAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = HEADS // KV_HEADS
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    seq = find(item_start, seqs, item, 1)
    first_item = tl.load(item_start + seq)
    splits = tl.load(item_start + seq + 1) - first_item
    if item - first_item >= splits:
        return
    n_keys = tl.load(kv_len + seq)
    split = _split_of(n_keys, SHORTEST, MOST)
    start = (item - first_item) * split
    last = tl.minimum(n_keys, start + split)
    if WINDOW:
        start = tl.maximum(start, tl.maximum(n_keys - window, 0) // BLOCK_N * BLOCK_N)
    lane = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + lane
    row_ok = lane < GROUP
    d = tl.arange(0, WIDE)
    mask_q = row_ok[:, None] & (d < DIM)[None, :]
    row = tl.load(query_start + seq).to(tl.int64) * HEADS
    # What is above comes with the step, before its first kernel; queries and the last key come from the kernel before.
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_q = tl.load(q + (row + head)[:, None] * DIM + d[None, :], mask=mask_q, other=0.0).to(keys.dtype.element_ty)
    acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc, top, total = _walk(
        acc, top, total, b_q, keys, values, table + seq.to(tl.int64) * tl.load(table_width), kv_head, lane * 0 + n_keys - 1,
        start, last, last, scale, cap, window, KV_HEADS, DIM, WIDE, SIZE, WINDOW, CAP, True, BLOCK_N,
    )  # fmt: skip
    p_out = out + row * DIM
    if splits == 1:
        if SINKS:
            acc, total = _sink(acc, top, total, sinks, head, row_ok)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        _store_heads(p_out, halved, acc, head, row_ok, HEADS, DIM, WIDE, BLOCK_M, HALVED, PLAIN)
    else:
        place = item.to(tl.int64) * HEADS + head
        tl.store(part + place[:, None] * DIM + d[None, :], acc, mask=mask_q)
        tl.store(top_sum + place * 2, top, mask=row_ok)
        tl.store(top_sum + place * 2 + 1, total, mask=row_ok)
        tl.debug_barrier()
        if tl.atomic_add(arrived + seq * KV_HEADS + kv_head, 1, sem="acq_rel") == splits - 1:
            tl.store(arrived + seq * KV_HEADS + kv_head, 0)
            _combine(
                p_out, halved, part, top_sum, sinks, first_item, splits, kv_head * GROUP, GROUP, HEADS, DIM, WIDE, SINKS,
                SHARE, MOST, AT_ONCE, HALVED, PLAIN,
            )  # fmt: skip


@triton.jit
def _combine(
    p_out, halved, part, top_sum, sinks, first_item, splits, first_head, GROUP: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, SINKS: tl.constexpr, SHARE: tl.constexpr, MOST: tl.constexpr,
    AT_ONCE: tl.constexpr, HALVED: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Adds the splits of a key head's queries, AT_ONCE at a time, in order."""
    lane = tl.arange(0, SHARE)
    head = first_head + lane
    row_ok = lane < GROUP
    d = tl.arange(0, WIDE)
    i = tl.arange(0, MOST)
    seen = row_ok[:, None] & (i < splits)[None, :]
    place = (first_item + i).to(tl.int64)[None, :] * HEADS + head[:, None]  # [SHARE, splits]
    tops = tl.load(top_sum + place * 2, mask=seen, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(tops, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.load(top_sum + place * 2 + 1, mask=seen, other=0.0, cache_modifier=".cg")
    total = tl.sum(sums * tl.exp2(tops - base[:, None]), 1)
    acc = tl.zeros([SHARE, WIDE], tl.float32)
    for begin in range(0, splits, AT_ONCE):
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
        acc, total = _sink(acc, base, total, sinks, head, row_ok)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    _store_heads(p_out, halved, acc, head, row_ok, HEADS, DIM, WIDE, SHARE, HALVED, PLAIN)


@triton.jit
def _store_heads(
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


def tiles(compute: Compute, head_dim: int, group: int, hopper: bool = False) -> tuple[Tile, Tile]:
    """For decode and for prefill, by the heads' shape alone; `hopper` for devices of capability 9."""
    wide = power_of_two(head_dim)
    share = power_of_two(group)
    if compute == "float32":
        # Products of float32 run on the plain units and hold whole rows in registers.
        # With 4 warps a width of 128 spills 8 bytes on sm_120, with 8 warps a width of 256 does (ptxas 13, Triton 3.9).
        small = Tile(max(16, share), 16, 8 if wide == 128 else 4, 1)
        return small, small
    # 64 keys of 128 values spill 64 to 104 bytes on sm_80 and sm_120 (ptxas 13, Triton 3.9).
    keys = 64 if wide < 128 else 32
    one = Tile(max(16, share), keys, 4, 2)
    if hopper:
        # On an H200, 4096 tokens of 32 heads of 128: 374 us, as with 128 rows by 128 keys in 8 warps; 425 to 575 in others.
        keys = 64 if wide <= 128 else 32
        return Tile(max(16, share), keys, 4, 3), Tile(max(64, share), keys, 4 if wide <= 128 else 8, 2)
    return one, Tile(max(64, share), keys, 4 if wide <= 128 else 8, 2)


def build_attention(site: Site, node: Node) -> Launch:
    """ATTENTION: q `[T, heads * head_dim]`, query_start `[S + 1]`, kv_len `[S]`, block_table `[S, B]`, sinks `[heads]`."""
    spec: AttentionSpec = node.spec
    q, query_start, kv_len, table = (site.slot(i) for i in node.inputs[:4])  # type: ignore[arg-type]
    cache = site.cache(node.inputs[4])  # type: ignore[arg-type]
    sinks = site.vector(node.inputs[5]) if spec.sinks else cache.k  # type: ignore[arg-type]
    target = site.slot(node.outputs[0])
    part = site.scratch("items", spec.width)
    top_sum = site.scratch("items", spec.n_heads * 2)
    arrived = site.zeros("S", spec.n_kv)
    whole = spec.head_dim in (32, 64, 128, 256)
    halved, plain = site.to_halve(node.outputs[0]) if whole else (None, True)
    wide, share = max(16, power_of_two(spec.head_dim)), power_of_two(spec.n_heads // spec.n_kv)
    one, many = tiles(site.compute, spec.head_dim, spec.n_heads // spec.n_kv, site.generation == 9)
    # A cap is applied to the score itself, so the factor of log2(e) comes after it.
    scale = spec.scale * (1.0 if spec.cap else LOG2E)
    switches = {"HEADS": spec.n_heads, "KV_HEADS": spec.n_kv, "DIM": spec.head_dim, "WIDE": wide}
    switches |= {"SIZE": cache.block_size, "WINDOW": spec.window > 0, "CAP": spec.cap != 0.0, "SINKS": spec.sinks}

    def run(live: Live) -> None:
        if live.single and not site.deterministic:
            halves = halved is not None and live.T == 1
            site.launch(
                attend_one, (live.items, spec.n_kv), target.tensor, target.tensor if halved is None else halved,
                part.tensor, top_sum.tensor, arrived.tensor, q.tensor, cache.k, cache.v, sinks, query_start.tensor,
                kv_len.tensor, table.tensor, site.work.table_width.tensor, site.work.item_start.tensor, live.S, scale,
                spec.cap, spec.window, **switches, SHARE=share, BLOCK_M=one.rows, BLOCK_N=one.keys,
                SHORTEST=LEAST_SPLIT, MOST=MOST_SPLITS, AT_ONCE=max(1, 8192 // (wide * share)), HALVED=halves,
                PLAIN=plain or not halves, warps=one.warps, stages=one.stages, early=starts_early(site),
            )  # fmt: skip
        if live.several or site.deterministic:
            queries = many.rows // share
            site.launch(
                attend_many, (live.T // queries + live.S, spec.n_kv), target.tensor, q.tensor, cache.k, cache.v, sinks,
                query_start.tensor, kv_len.tensor, table.tensor, site.work.table_width.tensor, live.S, scale, spec.cap,
                spec.window, **switches, SHARE=share, BLOCK_M=many.rows, BLOCK_N=many.keys,
                LEAST=1 if site.deterministic else 2, warps=many.warps, stages=many.stages,
            )  # fmt: skip

    return run


def _accepts(spec: AttentionSpec) -> str | None:
    if spec.head_dim > MAX_HEAD_DIM:
        return f"needs head_dim up to {MAX_HEAD_DIM}, got {spec.head_dim}"
    if spec.n_heads % spec.n_kv:
        return f"needs heads in equal groups, got {spec.n_heads} over {spec.n_kv}"
    if spec.scale <= 0 or spec.cap < 0:
        return f"needs a positive scale, got {spec.scale} with a cap of {spec.cap}"
    return None


IMPLEMENTATIONS = (Implementation(ATTENTION, "paged, split keys", build_attention, _accepts),)
