"""Attention over the paged cache: of sequences with one new token (decode), and `attend_many` for the others.

A sequence with one new token is cut into splits of its keys that run side by side (`splits.py`); the last program of a
sequence and key head to arrive combines them, always in order. `attend_one` takes a few such sequences, all warps of a
program at the same keys; `attend_warps` many of them, each warp at keys of its own. One with more new tokens (prefill)
walks all its keys in one program per tile of queries, masking only tiles that the diagonal or the window's edge cuts; where
a row's bits may not depend on its batch or on how its prompt is cut, all sequences go this way. A tile has BLOCK_M rows:
queries times the heads that share a key head. Softmax and sums are float32, powers of two with log2(e) in the scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Compute
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend import attend_whole
from quarrel.triton_backend.attend_one import LOG2E, attend_one, find, sink
from quarrel.triton_backend.attend_warps import attend_warps
from quarrel.triton_backend.codes import TL_TYPES, as_values
from quarrel.triton_backend.elementwise import tanh
from quarrel.triton_backend.rope import joined
from quarrel.triton_backend.runtime import INTERPRETED, Launch, Live, Site, Slot, power_of_two, starts_early
from quarrel.triton_backend.splits import MANY_SEQS, MOST_SPLITS, split_keys

MAX_HEAD_DIM = 256

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)


@dataclass(frozen=True)
class Tile:
    """`rows` of queries and heads by `keys`."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _walk(
    acc, top, total, b_q, keys, values, k_scales, v_scales, p_table, kv_head, position, start, stop, oldest, n_keys, scale,
    cap, window, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, MASK: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Takes in keys start to stop; MASK for tiles of which some row sees only a part, and none a key before `oldest`."""
    d = tl.arange(0, WIDE)
    d_ok = d < DIM
    for begin in range(start, stop, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        p_block = p_table + key // SIZE
        if MASK:
            key_ok = key < n_keys
            if WINDOW:  # blocks behind it may be another sequence's by now
                key_ok = key_ok & (key >= oldest)
            block = tl.load(p_block, mask=key_ok, other=0).to(tl.int64)
        else:
            block = tl.load(p_block).to(tl.int64)
        at = (block * KV_HEADS + kv_head) * SIZE + key % SIZE  # [BLOCK_N]
        p_k, p_v = keys + at[:, None] * DIM + d[None, :], values + at[:, None] * DIM + d[None, :]
        if MASK:
            b_k = tl.load(p_k, mask=key_ok[:, None] & d_ok[None, :], other=0)
        elif DIM == WIDE:
            b_k = tl.load(p_k)
        else:
            b_k = tl.load(p_k, mask=d_ok[None, :], other=0)
        score = tl.dot(b_q, tl.trans(as_values(b_k, KIND, COMPUTE)), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if KIND != "plain":
            if MASK:
                k_scale = tl.load(k_scales + at, mask=key_ok, other=0.0)
                v_scale = tl.load(v_scales + at, mask=key_ok, other=0.0)
            else:
                k_scale, v_scale = tl.load(k_scales + at), tl.load(v_scales + at)
            score = score * k_scale[None, :]
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
            b_v = tl.load(p_v, mask=key_ok[:, None] & d_ok[None, :], other=0)
        elif DIM == WIDE:
            b_v = tl.load(p_v)
        else:
            b_v = tl.load(p_v, mask=d_ok[None, :], other=0)
        if KIND != "plain":
            p = p * v_scale[None, :]
        acc = tl.dot(p.to(COMPUTE), as_values(b_v, KIND, COMPUTE), acc * fade[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["seqs"])
def attend_many(
    out, q, keys, values, k_scales, v_scales, sinks, query_start, kv_len, table, table_width, seqs, scale, cap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr, LEAST: tl.constexpr,
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
    near = n_keys - n_new + tile * QUERIES  # the position of the tile's first query
    position = near + lane // SHARE  # [BLOCK_M]
    d = tl.arange(0, WIDE)
    row = (begin + query).to(tl.int64) * HEADS + head  # [BLOCK_M]
    mask_q = row_ok[:, None] & (d < DIM)[None, :]
    b_q = tl.load(q + row[:, None] * DIM + d[None, :], mask=mask_q, other=0.0).to(COMPUTE)
    p_table = table + seq.to(tl.int64) * tl.load(table_width)
    acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    last = tl.minimum(n_keys, near + QUERIES)
    oldest = near * 0
    middle = oldest
    diagonal = (near + 1) // BLOCK_N * BLOCK_N
    if WINDOW:
        # Tiles that begin before the last query's window are cut by its edge.
        oldest = tl.maximum(near - window + 1, 0)
        first = oldest // BLOCK_N * BLOCK_N
        middle = tl.maximum(near + QUERIES - window + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
        middle = tl.minimum(tl.maximum(middle, first), tl.maximum(diagonal, first))
        acc, top, total = _walk(
            acc, top, total, b_q, keys, values, k_scales, v_scales, p_table, kv_head, position, first, middle, oldest,
            n_keys, scale, cap, window, KV_HEADS, DIM, WIDE, SIZE, WINDOW, CAP, True, BLOCK_N, KIND, COMPUTE,
        )  # fmt: skip
    acc, top, total = _walk(
        acc, top, total, b_q, keys, values, k_scales, v_scales, p_table, kv_head, position, middle, diagonal, oldest,
        n_keys, scale, cap, window, KV_HEADS, DIM, WIDE, SIZE, WINDOW, CAP, False, BLOCK_N, KIND, COMPUTE,
    )  # fmt: skip
    acc, top, total = _walk(
        acc, top, total, b_q, keys, values, k_scales, v_scales, p_table, kv_head, position, tl.maximum(diagonal, middle),
        last, oldest, n_keys, scale, cap, window, KV_HEADS, DIM, WIDE, SIZE, WINDOW, CAP, True, BLOCK_N, KIND, COMPUTE,
    )  # fmt: skip
    if SINKS:
        acc, total = sink(acc, top, total, sinks, head, row_ok)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=mask_q)


def tiles(compute: Compute, head_dim: int, group: int, hopper: bool = False) -> tuple[Tile, Tile]:
    """For decode and for prefill, by the heads' shape alone; `hopper` for devices of capability 9."""
    wide = power_of_two(head_dim)
    share = power_of_two(group)
    rows = max(16, share)
    if compute == "float32":
        # Products of float32 run on the plain units and hold whole rows in registers.
        # With 4 warps a width of 128 spills 8 bytes on sm_120, with 8 warps a width of 256 does (ptxas 13, Triton 3.9).
        small = Tile(rows, 16, 8 if wide == 128 else 4, 1)
        return small, small
    # Decode holds two tiles of keys and of values in registers: 206 to 245 of them.
    one = Tile(rows, 64 if wide <= 128 else 32, 4, 1)
    if hopper:
        # On an H200, 4096 tokens of 32 heads of 128: 374 us, as with 128 rows by 128 keys in 8 warps; 425 to 575 in others.
        return one, Tile(max(64, share), 64 if wide <= 128 else 32, 4 if wide <= 128 else 8, 2)
    # 64 keys of 128 values spill 64 to 104 bytes on sm_80 and sm_120 (ptxas 13, Triton 3.9).
    return one, Tile(max(64, share), 64 if wide < 128 else 32, 4 if wide <= 128 else 8, 2)


def crowded(one: Tile) -> Tile:
    """The tile of `attend_one` for MANY_SEQS sequences: fewer registers, so more programs at once.

    A layer of Mistral-7B with 128 sequences of 192 keys took 291.1 us on an H200, 263.4 so; with 32 sequences 140.9, 135.8.
    """
    return replace(one, keys=min(one.keys, 32))


@dataclass(frozen=True)
class Warps:
    """`attend_warps` with so many key heads a program, keys a warp, and tiles that are on their way or in use."""

    heads: int
    keys: int
    stages: int


def warps_for(seqs: int, items: int, spec: AttentionSpec, size: int, kind: str) -> Warps | None:
    """The form of `attend_warps` for so many sequences and items over blocks of `size` keys; None for `attend_one`.

    Tokens/s of Mistral-7B on an H200, a step of so many sequences that hold so many tokens (`bench/attend_steps.py`; by
    itself attention of few sequences is as fast in one warp, beside the maps of a step it is not):

    | | 8 x 128 | 8 x 640 | 8 x 4000 | 32 x 128 | 32 x 640 | 32 x 2000 | 64 x 640 | 128 x 128 | 128 x 640 |
    |---|---|---|---|---|---|---|---|---|---|
    | attend_one | 3363 | 2987 | 1771 | 7333 | 6212 | 4361 | 8476 | 17889 | 12477 |
    | 1 head, 32 keys | 2541 | 2497 | 1790 | 6595 | 5755 | 4489 | 8815 | 18322 | 14227 |
    | 4 heads, 16 keys | | | | | 5521 | | 8359 | 18938 | 14615 |
    """
    keys = min(size, 32)
    wide, share = max(16, power_of_two(spec.head_dim)), power_of_two(spec.n_heads // spec.n_kv)
    if keys not in (16, 32) or size % keys or wide > 128 or share > 16:
        return None
    if kind != "plain" and spec.head_dim != wide:
        return None  # spills 24 bytes
    if seqs > 64:
        if wide == 128 and spec.n_kv % 4 == 0:
            return Warps(4, 16, 3)
        return Warps(2 if spec.n_kv % 2 == 0 else 1, keys, 3)
    # More than 1024 keys a sequence: 64 with 640 would gain too, but the items of a graph do not tell them from 128.
    return Warps(1, keys, 3 if keys == 32 else 5) if seqs >= MANY_SEQS and items > 4 * seqs else None


@dataclass(frozen=True)
class _Rotation:
    """What a ROPE_APPEND leaves to the attention behind it."""

    slots: tuple[Slot, ...]  # q, k, v, positions, slots
    freq: torch.Tensor
    magnitudes: tuple[float, float]
    neox: bool

    @classmethod
    def of(cls, site: Site, node: Node) -> _Rotation:
        q, k, v, positions, freq, slots = node.inputs[:6]
        spec = node.spec
        taken = tuple(site.slot(i) for i in (q, k, v, positions, slots))  # type: ignore[arg-type]
        return cls(taken, site.const(freq), (spec.q.magnitude, spec.k.magnitude), spec.q.style == "neox")  # type: ignore[arg-type]

    def arguments(self) -> tuple[object, ...]:
        q, k, v, positions, slots = (s.tensor for s in self.slots)
        return q, k, v, positions, self.freq, slots, *self.magnitudes


def _none(q: Slot) -> tuple[object, ...]:
    """The same where queries are rotated already."""
    return *(q.tensor,) * 6, 1.0, 1.0


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
    if cache.kind != "plain" and site.generation != 9:
        one = replace(one, keys=max(16, one.keys // 2))  # with as many codes, sm_80 spills 53 to 81 words
    many_seqs = crowded(one)
    # A cap is applied to the score itself, so the factor of log2(e) comes after it.
    scale = spec.scale * (1.0 if spec.cap else LOG2E)
    switches = {"HEADS": spec.n_heads, "KV_HEADS": spec.n_kv, "DIM": spec.head_dim, "WIDE": wide}
    switches |= {"SIZE": cache.block_size, "WINDOW": spec.window > 0, "CAP": spec.cap != 0.0, "SINKS": spec.sinks}
    switches |= {"KIND": cache.kind, "COMPUTE": TL_TYPES[site.compute]}
    # Two tiles of so wide a head in float32 do not fit registers: such a step goes the way of prompts.
    apart = site.deterministic or (site.compute == "float32" and wide > 128)
    before = None if apart else joined(site, node.inputs[0], cache)  # type: ignore[arg-type]
    rotation = None if before is None else _Rotation.of(site, before)
    by_library = attend_whole.build(site, node)

    # Measured on Hopper alone; the interpreter has it too, for the tests.
    warps = (site.generation == 9 or INTERPRETED) and site.compute != "float32"

    def run(live: Live) -> None:
        if live.single and not apart:
            halves = halved is not None and live.T == 1
            rotated = None if live.several else rotation
            form = warps_for(live.S, live.items, spec, cache.block_size, cache.kind) if warps else None
            tile = one if live.S < MANY_SEQS else many_seqs
            kernel: Any = attend_one
            count, stages, own = tile.warps, 2, {"BLOCK_N": tile.keys}
            at_once = min(8192, 2048 * count)
            if form is not None:
                fits = spec.n_kv % form.heads == 0 and cache.block_size % form.keys == 0
                assert fits, f"{form} for {spec.n_kv} key heads and blocks of {cache.block_size} keys"
                kernel, count, stages = attend_warps, form.heads, form.stages
                at_once = 2048  # values of splits, so many stages of which fit beside the keys
                own = {"H": form.heads, "KEYS": form.keys, "STAGES": stages, "ASM": not INTERPRETED}
            site.launch(
                kernel, (live.items, spec.n_kv // (1 if form is None else form.heads)), target.tensor,
                target.tensor if halved is None else halved, part.tensor, top_sum.tensor, arrived.tensor,
                *(_none(q) if rotated is None else rotated.arguments()), cache.k, cache.v, *cache.both_scales, sinks,
                query_start.tensor, kv_len.tensor, table.tensor, site.work.table_width.tensor,
                site.work.item_start.tensor, live.S, scale, spec.cap, spec.window, **switches, SHARE=share,
                ROTATE=rotated is not None, NEOX=rotated is not None and rotated.neox, BLOCK_M=tile.rows,
                SPLIT=split_keys(live.S), MOST=MOST_SPLITS, AT_ONCE=max(1, at_once // (wide * share)),
                HALVED=halves, PLAIN=plain or not halves, EARLY=not live.several, **own, warps=count, stages=stages,
                early=starts_early(site),
            )  # fmt: skip
        if by_library is not None and by_library(live):
            return
        if live.several or apart:
            queries = many.rows // share
            site.launch(
                attend_many, (live.T // queries + live.S, spec.n_kv), target.tensor, q.tensor, cache.k, cache.v,
                *cache.both_scales, sinks, query_start.tensor, kv_len.tensor, table.tensor, site.work.table_width.tensor,
                live.S, scale, spec.cap, spec.window, **switches, SHARE=share, BLOCK_M=many.rows, BLOCK_N=many.keys,
                LEAST=1 if apart else 2, warps=many.warps, stages=many.stages,
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
