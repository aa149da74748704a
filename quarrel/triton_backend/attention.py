"""Attention over the paged cache: one kernel, launched for each of two kinds of sequence, and a combine.

A sequence with one new token (decode) is cut into splits of SPLIT keys that run side by side and are combined in order; one
with more (prefill) walks all its keys in one program per tile of queries. Which of the two depends on the sequence alone,
and every tile of keys starts at a multiple of BLOCK_N, so a row's result never depends on the rest of the batch. A tile has
BLOCK_M rows: queries times the heads that share a key head. Softmax and sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Compute
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.elementwise import tanh
from quarrel.triton_backend.runtime import Launch, Live, Site, cdiv, power_of_two

SPLIT = 512
"""Keys of a decode item. Fixed: how many there are never changes how one is summed."""
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Tile:
    """`rows` of queries and heads by `keys`."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def find(starts, n, item, PER: tl.constexpr):
    """The last s below n with starts[s] // PER + (s if PER > 1 else 0) <= item."""
    low = item * 0
    high = n
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(starts + middle)
        if PER > 1:
            begin = begin // PER + middle
        if begin <= item:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["seqs"])
def attend(
    out, part, top_sum, q, keys, values, sinks, query_start, kv_len, table, table_width, item_start, seqs, scale,
    cap, window, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
    SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = BLOCK_M // SHARE
    # The sequence of this program, its first query, and the keys it reads.
    if SPLIT > 0:
        seq = find(item_start, seqs, item, 1)
        if item >= tl.load(item_start + seq + 1):
            return
        tile = 0
    else:
        seq = find(query_start, seqs, item, QUERIES)
        tile = item - (tl.load(query_start + seq) // QUERIES + seq)
    begin = tl.load(query_start + seq)
    n_new = tl.load(query_start + seq + 1) - begin
    n_keys = tl.load(kv_len + seq)
    if SPLIT == 0:  # noqa: SIM102 (the outer test is settled at compile time)
        if (n_new < 2) | (tile * QUERIES >= n_new):
            return
    lane = tl.arange(0, BLOCK_M)
    query = tile * QUERIES + lane // SHARE
    head = kv_head * GROUP + lane % SHARE
    row_ok = (query < n_new) & (lane % SHARE < GROUP)
    position = n_keys - n_new + query  # [BLOCK_M]
    first = 0
    last = tl.minimum(n_keys, n_keys - n_new + (tile + 1) * QUERIES)
    if SPLIT > 0:
        first = (item - tl.load(item_start + seq)) * SPLIT
        last = tl.minimum(n_keys, first + SPLIT)
    if WINDOW:
        oldest = tl.maximum(n_keys - n_new + tile * QUERIES - window + 1, 0)
        first = tl.maximum(first, oldest // BLOCK_N * BLOCK_N)
    d = tl.arange(0, WIDE)
    d_ok = d < DIM
    row = (begin + query).to(tl.int64) * HEADS + head  # [BLOCK_M]
    mask_q = row_ok[:, None] & d_ok[None, :]
    b_q = tl.load(q + row[:, None] * DIM + d[None, :], mask=mask_q, other=0.0)
    b_q = b_q.to(keys.dtype.element_ty)
    p_table = table + seq.to(tl.int64) * tl.load(table_width)
    acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        key_ok = key < last
        block = tl.load(p_table + key // SIZE, mask=key_ok, other=0).to(tl.int64)
        at = ((block * KV_HEADS + kv_head) * SIZE + key % SIZE) * DIM  # [BLOCK_N]
        b_k = tl.load(keys + at[None, :] + d[:, None], mask=key_ok[None, :] & d_ok[:, None], other=0.0)
        score = tl.dot(b_q, b_k, input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        if CAP:
            score = cap * tanh(score / cap)
        back = position[:, None] - key[None, :]
        seen = (back >= 0) & key_ok[None, :] & row_ok[:, None]
        if WINDOW:
            seen = seen & (back < window)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        # A row that has seen no key yet keeps -inf; zero in its place leaves every exponential zero.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp(score - base[:, None])
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(p, 1)
        b_v = tl.load(values + at[:, None] + d[None, :], mask=key_ok[:, None] & d_ok[None, :], other=0.0)
        acc = tl.dot(p.to(values.dtype.element_ty), b_v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    if SPLIT > 0:
        place = item.to(tl.int64) * HEADS + head
        tl.store(part + place[:, None] * DIM + d[None, :], acc, mask=mask_q)
        tl.store(top_sum + place * 2, top, mask=row_ok)
        tl.store(top_sum + place * 2 + 1, total, mask=row_ok)
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=row_ok, other=0.0)
            new_top = tl.maximum(top, sink)
            fade = tl.exp(top - new_top)
            total = total * fade + tl.exp(sink - new_top)
            acc = acc * fade[:, None]
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + row[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=mask_q)


@triton.jit
def combine(
    out, part, top_sum, sinks, query_start, item_start, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    begin = tl.load(query_start + seq)
    if tl.load(query_start + seq + 1) - begin != 1:
        return
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    ok = head < HEADS
    d = tl.arange(0, WIDE)
    mask = ok[:, None] & (d < DIM)[None, :]
    acc = tl.zeros([BLOCK_H, WIDE], tl.float32)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=ok, other=0.0)
        total = tl.full([BLOCK_H], 1.0, tl.float32)
    for item in range(tl.load(item_start + seq), tl.load(item_start + seq + 1)):
        place = tl.cast(item, tl.int64) * HEADS + head
        other = tl.load(top_sum + place * 2, mask=ok, other=float("-inf"))
        new_top = tl.maximum(top, other)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade, share = tl.exp(top - base), tl.exp(other - base)
        total = total * fade + tl.load(top_sum + place * 2 + 1, mask=ok, other=0.0) * share
        piece = tl.load(part + place[:, None] * DIM + d[None, :], mask=mask, other=0.0)
        acc = acc * fade[:, None] + piece * share[:, None]
        top = new_top
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    row = tl.cast(begin, tl.int64) * HEADS + head
    tl.store(out + row[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=mask)


def tiles(compute: Compute, head_dim: int, group: int) -> tuple[Tile, Tile]:
    """For decode and for prefill. Keys a tile are the same in both, and follow from the head's width alone."""
    wide = power_of_two(head_dim)
    share = power_of_two(group)
    if compute == "float32":
        # Products of float32 run on the plain units and hold whole rows in registers.
        # With 4 warps a width of 128 spills 8 bytes on sm_120, with 8 warps a width of 256 does (ptxas 13, Triton 3.9).
        small = Tile(max(16, share), 16, 8 if wide == 128 else 4, 1)
        return small, small
    # 64 keys of 128 values spill 64 to 104 bytes on sm_80 and sm_120 (ptxas 13, Triton 3.9).
    keys = 64 if wide < 128 else 32
    return Tile(max(16, share), keys, 4, 2), Tile(max(64, share), keys, 4 if wide <= 128 else 8, 2)


def build_attention(site: Site, node: Node) -> Launch:
    """ATTENTION: q `[T, heads * head_dim]`, query_start `[S + 1]`, kv_len `[S]`, block_table `[S, B]`, sinks `[heads]`."""
    spec: AttentionSpec = node.spec
    q, query_start, kv_len, table = (site.slot(i) for i in node.inputs[:4])  # type: ignore[arg-type]
    cache = site.cache(node.inputs[4])  # type: ignore[arg-type]
    sinks = site.vector(node.inputs[5]) if spec.sinks else cache.k  # type: ignore[arg-type]
    target = site.slot(node.outputs[0])
    part = site.scratch("items", spec.width)
    top_sum = site.scratch("items", spec.n_heads * 2)
    group, wide = spec.n_heads // spec.n_kv, max(16, power_of_two(spec.head_dim))
    decode, prefill = tiles(site.compute, spec.head_dim, group)
    share = power_of_two(group)
    heads_each = max(1, 1024 // wide)

    def start(tile: Tile, count: int, live: Live, split: int) -> None:
        site.launch(
            attend, (count, spec.n_kv), target.tensor, part.tensor, top_sum.tensor, q.tensor, cache.k, cache.v, sinks,
            query_start.tensor, kv_len.tensor, table.tensor, site.work.table_width.tensor, site.work.item_start.tensor,
            live.S, spec.scale, spec.cap, spec.window, HEADS=spec.n_heads, KV_HEADS=spec.n_kv, DIM=spec.head_dim,
            WIDE=wide, SIZE=cache.block_size, WINDOW=spec.window > 0, CAP=spec.cap != 0.0, SINKS=spec.sinks,
            SPLIT=split, SHARE=share, BLOCK_M=tile.rows, BLOCK_N=tile.keys, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip

    def run(live: Live) -> None:
        if live.single:
            start(decode, live.items, live, SPLIT)
            site.launch(
                combine, (live.S, cdiv(spec.n_heads, heads_each)), target.tensor, part.tensor, top_sum.tensor, sinks,
                query_start.tensor, site.work.item_start.tensor, HEADS=spec.n_heads, DIM=spec.head_dim, WIDE=wide,
                SINKS=spec.sinks, BLOCK_H=heads_each,
            )  # fmt: skip
        if live.several:
            start(prefill, live.T // (prefill.rows // share) + live.S, live, 0)

    return run


def _accepts(spec: AttentionSpec) -> str | None:
    if spec.head_dim > MAX_HEAD_DIM:
        return f"needs head_dim up to {MAX_HEAD_DIM}, got {spec.head_dim}"
    if spec.n_heads % spec.n_kv:
        return f"needs heads in equal groups, got {spec.n_heads} over {spec.n_kv}"
    return None


IMPLEMENTATIONS = (Implementation(ATTENTION, "paged, split keys", build_attention, _accepts),)
