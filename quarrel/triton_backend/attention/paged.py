"""Attention over the paged cache: of sequences with one new token (decode), and `attend_many` for the others.

A sequence with one new token is cut into splits of its keys that run side by side (`splits.py`); the last program of a
sequence and key head to arrive combines them, always in order. `attend_one` takes a few such sequences, all warps of a
program at the same keys; `attend_warps` many of them, each warp at keys of its own. One with more new tokens (prefill)
walks all its keys in one program per tile of queries, masking only tiles that the diagonal or the window's edge cuts. Where
a row's bits may not depend on its batch or on how its prompt is cut, both are those of `fixed.py`. A tile has BLOCK_M rows:
queries times the heads that share a key head. Softmax and sums are float32, powers of two with log2(e) in the scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from quarrel.ops.attention import ATTENTION, AttentionSpec, RopeAppendSpec
from quarrel.ops.contract import Compute
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.ops.rope import RopeSpec
from quarrel.triton_backend.attention import cudnn, fixed, ring
from quarrel.triton_backend.attention.decode import LOG2E, attend_one, oldest_key
from quarrel.triton_backend.attention.decode_head import attend_head
from quarrel.triton_backend.attention.decode_warps import attend_warps
from quarrel.triton_backend.attention.kv_codes import TL_TYPES
from quarrel.triton_backend.attention.records import Keys, Partial, Rotation, Score, Sequences, Shape, Warps
from quarrel.triton_backend.attention.rope import joined
from quarrel.triton_backend.attention.splits import MANY_SEQS, MOST_SPLITS, SEVERAL_SEQS, SPLIT, whole_rounds
from quarrel.triton_backend.attention.walk import load_queries, store_rows, tile_at, walk
from quarrel.triton_backend.runtime.arrays import Output
from quarrel.triton_backend.runtime.launch import INTERPRETED, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class Tile:
    """`rows` of queries and heads by `keys`."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["seqs"])
def attend_many(
    out, q, cache, sinks, see_to, sequences, seqs, score, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LEAST: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Causal attention of sequences with LEAST new tokens or more, whose keys are in the cache already.

    Grid (tiles of queries: T // QUERIES + S, n_kv); a tile has BLOCK_M = QUERIES * S.SHARE rows. Records, their shapes and
    types are those of `records.py`.

    out, q  act `[T, heads * head_dim]`; queries are rotated
    sinks   float32 `[heads]`, read with S.SINKS only
    see_to  int32 `[T]`, the last position that a query sees, read with S.SPANS only; in order, within a sequence
    """
    WIDE: tl.constexpr = S.WIDE
    QUERIES: tl.constexpr = BLOCK_M // S.SHARE
    # The last queries have the most keys: they begin first.
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, begin, n_new, tile = tile_at(sequences, seqs, item, QUERIES)
    if (n_new < LEAST) | (tile * QUERIES >= n_new):
        return
    b_q, row, head, row_ok, position, see, near, last, n_keys, p_table = load_queries(
        q, see_to, sequences, seq, begin, n_new, tile, kv_head, S, BLOCK_M, COMPUTE
    )
    acc = tl.zeros([BLOCK_M, WIDE], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    oldest = near * 0
    middle = oldest
    diagonal = (near + 1) // BLOCK_N * BLOCK_N
    if S.WINDOW:
        # Tiles that begin before the last query's window are cut by its edge.
        oldest = oldest_key(near, score.window, S.CHUNKED)
        first = oldest // BLOCK_N * BLOCK_N
        middle = (oldest_key(near + QUERIES - 1, score.window, S.CHUNKED) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        middle = tl.minimum(tl.maximum(middle, first), tl.maximum(diagonal, first))
        acc, top, total = walk(
            (acc, top, total), b_q, cache, p_table, kv_head, position, see, first, middle, oldest, n_keys, score,
            S, BLOCK_N, True, COMPUTE,
        )  # fmt: skip
    acc, top, total = walk(
        (acc, top, total), b_q, cache, p_table, kv_head, position, see, middle, diagonal, oldest, n_keys, score,
        S, BLOCK_N, False, COMPUTE,
    )  # fmt: skip
    acc, top, total = walk(
        (acc, top, total), b_q, cache, p_table, kv_head, position, see, tl.maximum(diagonal, middle), last, oldest,
        n_keys, score, S, BLOCK_N, True, COMPUTE,
    )  # fmt: skip
    store_rows(out, (acc, top, total), sinks, row, head, row_ok, S)


def tiles(compute: Compute, head_dim: int, group: int, hopper: bool = False) -> tuple[Tile, Tile]:
    """For decode and for prefill, by the heads' shape alone; `hopper` for devices of capability 9."""
    wide = power_of_two(head_dim)
    share = power_of_two(group)
    rows = max(16, share)
    if compute == "float32":
        # Products of float32 run on the plain units and hold whole rows in registers.
        # With 4 warps a width of 128 spills 8 bytes on sm_120, with 8 warps a width of 256 does (ptxas 13, Triton 3.9).
        small = Tile(rows, 16, 8 if wide == 128 or wide > 256 else 4, 1)
        return small, small
    if wide > 256:
        # Full layers of Gemma 4: the result alone is 128 registers a thread.
        return Tile(rows, 16, 8, 1), Tile(max(32, share), 16, 8, 2)
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


def several(one: Tile, head_dim: int) -> Tile:
    """The tile of `attend_one` for SEVERAL_SEQS to MANY_SEQS sequences, whose splits are longer.

    8 sequences of Mistral-7B behind 128 tokens: 3,504 tokens/s on an H200 for 3,442; heads of 64 do not gain.
    """
    return replace(one, warps=8) if one.keys == 64 and head_dim > 64 else one


def single(one: Tile, wide: int, programs: int) -> Tile:
    """The tile of `attend_one` for one sequence on an H200: eight warps for heads of 64, and for those of 128 where each
    program may have a multiprocessor.

    A layer of gpt-oss 0.4 us less; 8 layers of Mistral-7B with few keys 443.7 us for 449.3 in Q4_K_M and 582.2 for 588.4 in
    Q8_0 (2026-11-27).
    """
    return replace(one, warps=8) if wide == 64 or (wide == 128 and programs <= 128) else one


HEAD_PROGRAMS = 128
"""Programs up to which one sequence with heads of more than 128 values has `attend_head`, by the items of its bucket: up to
2048 keys of 8 heads. On an H200, in buckets of as many splits as there are, 12 layers of Gemma-4-E4B, whose 8 heads have
256 values or 512, take 640 us for 689, and 726 for 748 behind 600 keys; 6 of Gemma 4 26B-A4B 498 for 519 (in 8 warps).
Heads of 128 lose: 8 layers of Mistral-7B 442 us for 434, 493 for 469 behind 500 keys and 524 for 474 behind 1000. Heads
of 64 gain 2.5 us in 415 (gpt-oss), which is not worth a kernel more."""
WIDE_SPLITS = 32
"""Short splits of heads of more than 128 values: up to 1024 keys."""
HEAD_ITEMS = 4
"""The bucket of one sequence with up to so many splits."""


def head_tile(items: int, wide: int) -> tuple[int, int]:
    """Keys of a tile of `attend_head`, and its warps: 4 with half as many keys take 640 us for 652 where a sequence has one
    split, and 743 for 726 where it has five."""
    return (4096 // wide, 4) if items <= HEAD_ITEMS else (8192 // wide, 8)


def warps_for(seqs: int, items: int, spec: AttentionSpec, size: int, kind: str) -> Warps | None:
    """The form of `attend_warps` for so many sequences and items over blocks of `size` keys; None for `attend_one`.

    Tokens/s of Mistral-7B on an H200, a step of so many sequences that hold so many tokens (docs/decisions.md; by
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


def splits_for(specs: Iterable[AttentionSpec], compute: Compute, kind: str, generation: int, processors: int) -> int:
    """Most splits of each of a few sequences, on a device of so many multiprocessors: what all layers of a step share.

    `attend_one` is known to run twice on a multiprocessor where heads are 65 to 256 wide, by its 204 to 255 registers.
    Behind a window longer than a split few of them have work: fewer splits would leave it to fewer programs.
    """
    layers = list(specs)
    heads = {spec.n_kv for spec in layers}
    known = all(64 < spec.head_dim <= 256 and spec.window <= SPLIT and not spec.latent for spec in layers)
    if len(heads) != 1 or not known or compute == "float32" or (kind != "plain" and generation != 9):
        return MOST_SPLITS
    return whole_rounds(heads.pop(), 2 * processors)


def short_splits(layers: Sequence[AttentionSpec]) -> int:
    """How many splits of one sequence have a tile of keys, where its few programs would walk several tiles one after the
    other; what all layers of a step share.

    Up to 128 keys 12 layers of Gemma-4-E4B took 647 us on an H200 for 660 with splits of 128 keys, behind 500 keys 680 for
    726; 6 of Gemma 4 26B-A4B 493 for 502 and 525 for 536.
    """
    if layers and all(spec.latent for spec in layers):
        return MOST_SPLITS
    return WIDE_SPLITS if layers and all(spec.head_dim > 128 for spec in layers) else 0


def _rotation(site: Site, node: Node) -> Callable[[], tuple[torch.Tensor, Rotation]]:
    """Queries and the rest of a ROPE_APPEND that leaves its work to the attention behind it, at each call."""
    spec: RopeAppendSpec = node.spec
    q, k, v, positions, freq, slots = node.inputs[:6]
    arrays = [site.slot(i) for i in (q, k, v, positions, slots)]  # type: ignore[arg-type]
    table = site.const(freq)  # type: ignore[arg-type]

    def at_call() -> tuple[torch.Tensor, Rotation]:
        q, k, v, positions, slots = (a.tensor for a in arrays)
        return q, Rotation(k, v, positions, table, slots, spec.q.magnitude, spec.k.magnitude)

    return at_call


def _rotation_shape(spec: RopeSpec) -> tuple[int, int]:
    """`Shape.ROT` and `Shape.AXES`."""
    whole = spec.n_rot == spec.head_dim and spec.axes == 1
    return (0, 1) if whole else (spec.n_rot, spec.axes)


def build_attention(site: Site, node: Node) -> Launch:
    """ATTENTION: q `[T, heads * head_dim]`, query_start `[S + 1]`, kv_len `[S]`, block_table `[S, B]`, sinks `[heads]`."""
    spec: AttentionSpec = node.spec
    q, query_start, kv_len, table = (site.slot(i) for i in node.inputs[:4])  # type: ignore[arg-type]
    cache = site.cache(node.inputs[4])  # type: ignore[arg-type]
    sinks = site.vector(node.inputs[5]) if spec.sinks else cache.k  # type: ignore[arg-type]
    see_to = site.slot(node.inputs[-1]) if spec.spans else query_start  # type: ignore[arg-type]
    target = site.slot(node.outputs[0])
    part = site.scratch("items", spec.width)
    top_sum = site.scratch("items", spec.n_heads * 2)
    arrived = site.zeros("S", spec.n_heads)
    whole = spec.head_dim in (32, 64, 128, 256, 512)
    int8x2, plain = site.int8x2_target(node.outputs[0]) if whole else (None, True)
    wide, share = max(16, power_of_two(spec.head_dim)), power_of_two(spec.n_heads // spec.n_kv)
    one, many = tiles(site.compute, spec.head_dim, spec.n_heads // spec.n_kv, site.generation == 9)
    if cache.kind != "plain" and site.generation != 9:
        one = replace(one, keys=max(16, one.keys // 2))  # with as many codes, sm_80 spills 53 to 81 words
    # Tiles of keys on their way to one query: more than a prompt's products leave time for.
    alone = replace(many, stages=3) if site.generation == 9 and wide <= 128 and site.compute != "float32" else many
    some_seqs = several(one, spec.head_dim) if site.generation == 9 and cache.kind == "plain" else one
    many_seqs = crowded(one)
    # A cap is applied to the score itself, so the factor of log2(e) comes after it.
    score = Score(spec.scale * (1.0 if spec.cap else LOG2E), spec.cap, spec.window)
    # Two tiles of so wide a head in float32 do not fit registers: such a step takes the kernel of prompts.
    by_prompts = site.compute == "float32" and wide > 128 and not site.deterministic
    before = None if by_prompts or site.deterministic else joined(site, node.inputs[0], cache)  # type: ignore[arg-type]
    shape = Shape(
        spec.n_heads, spec.n_kv, spec.head_dim, wide, share, cache.block_size, spec.window > 0, spec.cap != 0.0, spec.sinks,
        cache.kind, spec.chunked, spec.spans, *((0, 1) if before is None else _rotation_shape(before.spec.q)),
    )  # fmt: skip
    common = {"cache": Keys(cache.k, cache.v, *cache.both_scales), "sinks": sinks, "score": score, "S": shape}
    common |= {"COMPUTE": TL_TYPES[site.compute]}
    rotation = None if before is None else _rotation(site, before)
    style = "" if before is None else before.spec.q.style
    each = shape._replace(KV_HEADS=spec.n_heads, SHARE=1)
    by_cudnn = cudnn.build(site, node)
    by_ring = ring.RingLaunch(site, cache, shape) if ring.declines(site, spec, cache) is None else None
    # Measured on Hopper alone; the interpreter has it too, for the tests.
    warps = (site.generation == 9 or INTERPRETED) and site.compute != "float32"

    def sequences() -> Sequences:
        return Sequences(query_start.tensor, kv_len.tensor, table.tensor, site.tables.table_width.tensor)

    def decode(batch: Batch) -> None:
        """The sequences with one new token."""
        out, form = target.tensor, "plain"
        if int8x2 is not None and batch.T == 1:
            form = "both" if plain else "int8x2"
        queries, rope, rotate = q.tensor, Rotation(*(q.tensor,) * 5, 1.0, 1.0), ""
        if rotation is not None and not batch.prefill:
            (queries, rope), rotate = rotation(), style
        output = Output(out, out if int8x2 is None else int8x2)
        given = {"partial": Partial(part.tensor, top_sum.tensor, arrived.tensor), "q": queries, "rotation": rope}
        given |= {"sequences": sequences(), "item_start": site.tables.item_start.tensor, "ROTATE": rotate}
        more = {"seqs": batch.S, "EARLY": not batch.prefill}
        if by_ring is not None and ring.serves(batch, spec, cache.kind):
            by_ring(batch, given | more | {n: common[n] for n in ("cache", "score", "COMPUTE")}, output, sinks, form)
            return
        w = warps_for(batch.S, batch.items, spec, cache.block_size, cache.kind) if warps else None
        tile = one if batch.S < SEVERAL_SEQS else some_seqs if batch.S < MANY_SEQS else many_seqs
        if batch.S == 1 and site.generation == 9:
            tile = single(one, wide, batch.items * spec.n_kv)
        kernel: Any = attend_one
        programs, count, stages, own = spec.n_kv, tile.warps, 2, more | {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
        values = min(8192, 2048 * count) // share
        if w is not None:
            fits = spec.n_kv % w.heads == 0 and cache.block_size % w.keys == 0
            assert fits, f"{w} for {spec.n_kv} key heads and blocks of {cache.block_size} keys"
            kernel, programs, count, stages = attend_warps, spec.n_kv // w.heads, w.heads, w.stages
            own = more | {"BLOCK_M": tile.rows, "W": w}
            values = 2048 // share  # of splits, so many stages of which fit beside the keys
        elif warps and batch.S == 1 and wide > 128 and batch.items * spec.n_heads <= HEAD_PROGRAMS:
            keys, count = head_tile(batch.items, wide)
            kernel, programs, own, values = attend_head, spec.n_heads, {"EACH": each, "BLOCK_N": keys}, 1024 * count
        site.launch(
            kernel, (batch.items, programs), output=output, **given, **common, **own, AT_ONCE=max(1, values // wide),
            FORM=form, warps=count, stages=stages, early=starts_early(site),
        )  # fmt: skip

    def prefill(batch: Batch) -> None:
        """The others, or all."""
        site.launch(
            attend_many, (batch.T // (many.rows // share) + batch.S, spec.n_kv), out=target.tensor, q=q.tensor,
            see_to=see_to.tensor, sequences=sequences(), seqs=batch.S, **common, BLOCK_M=many.rows, BLOCK_N=many.keys,
            LEAST=1 if by_prompts else 2, warps=many.warps, stages=many.stages,
        )  # fmt: skip

    def same(batch: Batch) -> None:
        """All of them, with splits at fixed keys."""
        shared = {"q": q.tensor, "see_to": see_to.tensor, "sequences": sequences(), "seqs": batch.S, **common}
        shared |= {"BLOCK_M": many.rows, "BLOCK_N": many.keys, "SPLIT": fixed.SPLIT, "early": starts_early(site)}
        if batch.decode:
            site.launch(
                fixed.attend_fixed_one, (batch.items, spec.n_kv), out=target.tensor,
                partial=Partial(part.tensor, top_sum.tensor, arrived.tensor), item_start=site.tables.item_start.tensor,
                **shared, warps=many.warps, stages=alone.stages,
            )  # fmt: skip
        if batch.prefill:
            grid = (batch.T // (many.rows // share) + batch.S, spec.n_kv)
            site.launch(
                fixed.attend_fixed_many, grid, out=target.tensor, least=2 if batch.decode else 1, **shared,
                warps=many.warps, stages=many.stages,
            )  # fmt: skip

    if site.deterministic:
        return same

    def run(batch: Batch) -> None:
        if batch.decode and not by_prompts:
            decode(batch)
        if by_cudnn is not None and by_cudnn(batch):
            return
        if batch.prefill or by_prompts:
            prefill(batch)

    return run


def _accepts(spec: AttentionSpec) -> str | None:
    if spec.latent:
        return f"needs values of their own, got {spec.latent} that are a key's too"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"needs head_dim up to {MAX_HEAD_DIM}, got {spec.head_dim}"
    if spec.n_heads % spec.n_kv:
        return f"needs heads in equal groups, got {spec.n_heads} over {spec.n_kv}"
    if spec.scale <= 0 or spec.cap < 0:
        return f"needs a positive scale, got {spec.scale} with a cap of {spec.cap}"
    return None


IMPLEMENTATIONS = (Implementation(ATTENTION, "paged, split keys", build_attention, _accepts),)
