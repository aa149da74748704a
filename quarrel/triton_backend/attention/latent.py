"""Attention over compressed keys that all heads share, and that are the values too (`AttentionSpec.latent`).

Heads are rows of the products: a tile of rows meets a tile of keys that is loaded once, for scores and for values. A
sequence with one new token is cut into splits of its keys (`splits.py`), which `combine_latent` adds, a program to a head;
one with more walks all its keys in one program for each tile of rows, masking only tiles that the diagonal cuts. Softmax
and sums are float32, powers of two with log2(e) in the scale. One sequence with few splits has a program to a head instead
(`latent_head.py`).

In a step without prompts the norm, the rotation and the append before it may be its own work, and of one token the splits
may be added by the map of heads behind it (`fuse.py`).

Of a sequence with one new token the older keys were written by earlier steps, so the first of them are brought to L2
before the kernel waits for the queries, and where they lie is known a tile ahead. The new key and value begin the sums of
the split that they belong to, whoever wrote them, so a row's bits are the same either way; where this kernel writes them
they never come back from memory.

    bytes      RANK + DIM values a key (1152 for DeepSeek's 512 + 64 in 16 bits), once for each 32 heads
    registers  a float32 sum of RANK columns a row: 64 a thread for 32 rows of 512 in 8 warps, and for 16 rows in 4; half of
               that for one sequence, whose 16 rows have 8
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quarrel.ops.attention import ATTENTION, AttentionSpec, RopeAppendSpec
from quarrel.ops.contract import Compute
from quarrel.ops.norm import NormSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.attention import latent_head
from quarrel.triton_backend.attention.decode import LOG2E, find, rotated
from quarrel.triton_backend.attention.kv_codes import TL_TYPES, as_values
from quarrel.triton_backend.attention.latent_head import attend_latent_head
from quarrel.triton_backend.attention.records import Append, Keys, Partial, Rotation, Sequences
from quarrel.triton_backend.attention.rope import sin_cos
from quarrel.triton_backend.attention.splits import combine_head, split_of
from quarrel.triton_backend.linear.heads import build_head_linear
from quarrel.triton_backend.runtime.arrays import DTYPES
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, starts_early

_ASM: tl.constexpr = tl.constexpr(not INTERPRETED)


class LatentShape(NamedTuple):
    """Constants of a layer."""

    HEADS: int
    DIM: int
    """Of the key that is rotated."""
    RANK: int
    """Of the compressed vector."""
    SIZE: int
    """Keys of a block."""
    KIND: str
    """As in `records.Shape`."""


@dataclass(frozen=True)
class Tile:
    """`rows` of heads, or of queries and heads, by `keys`."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _add_keys(
    sums, q_key, q_rest, cache, p_table, position, start, stop, n_keys, scale, S: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Adds keys start to stop; MASK for tiles of which some row [M] sees only a part: keys up to its position, and below
    n_keys."""
    SIZE: tl.constexpr = S.SIZE
    KIND: tl.constexpr = S.KIND
    d = tl.arange(0, S.DIM)
    r = tl.arange(0, S.RANK)
    for begin in range(start, stop, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        if MASK:
            key_ok = key < n_keys
            at = tl.load(p_table + key // SIZE, mask=key_ok, other=0).to(tl.int64) * SIZE + key % SIZE  # [BLOCK_N]
            b_k = tl.load(cache.k + at[:, None] * S.DIM + d[None, :], mask=key_ok[:, None], other=0)
            b_v = tl.load(cache.v + at[:, None] * S.RANK + r[None, :], mask=key_ok[:, None], other=0)
        else:
            at = tl.load(p_table + key // SIZE).to(tl.int64) * SIZE + key % SIZE
            b_k = tl.load(cache.k + at[:, None] * S.DIM + d[None, :])
            b_v = tl.load(cache.v + at[:, None] * S.RANK + r[None, :])
        k_scale = tl.zeros([BLOCK_N], tl.float32)
        v_scale = k_scale
        if KIND != "plain":
            if MASK:
                k_scale = tl.load(cache.k_scale + at, mask=key_ok, other=0.0)
                v_scale = tl.load(cache.v_scale + at, mask=key_ok, other=0.0)
            else:
                k_scale, v_scale = tl.load(cache.k_scale + at), tl.load(cache.v_scale + at)
        seen = True
        if MASK:
            seen = (key[None, :] <= position[:, None]) & key_ok[None, :]
        sums = _add_tile(sums, q_key, q_rest, (b_k, b_v, k_scale, v_scale), seen, scale, KIND, MASK, COMPUTE)
    return sums


@triton.jit
def _add_tile(
    sums, q_key, q_rest, tile, seen, scale, KIND: tl.constexpr, MASK: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """Adds keys that are there: b_k [BLOCK_N, DIM], b_v [BLOCK_N, RANK] and the scales of codes [BLOCK_N]; with MASK those
    that are `seen` [M or 1, BLOCK_N]."""
    acc, top, total = sums
    b_k, b_v, k_scale, v_scale = tile
    v = as_values(b_v, KIND, COMPUTE)
    products = tl.dot(q_key, tl.trans(as_values(b_k, KIND, COMPUTE)), input_precision="ieee")  # [M, BLOCK_N]
    if KIND == "plain":
        products = tl.dot(q_rest, tl.trans(v), products, input_precision="ieee")
    else:
        rest = tl.dot(q_rest, tl.trans(v), input_precision="ieee")
        products = products * k_scale[None, :] + rest * v_scale[None, :]
    if MASK:
        products = tl.where(seen, products, float("-inf"))
    # The scale is positive, so it may follow the maximum, where it is one operation with the difference.
    new_top = tl.maximum(top, tl.max(products, 1) * scale)
    base = new_top
    if MASK:
        # A row that has seen no key yet keeps -inf; zero in its place leaves every power zero.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(products * scale - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(p, 1)
    if KIND != "plain":
        p = p * v_scale[None, :]
    return tl.dot(p.to(COMPUTE), v, acc * fade[:, None], input_precision="ieee"), new_top, total


@triton.jit
def _rows(p_table, begin, stop, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where keys begin.. below `stop` lie in the cache, int64 [BLOCK_N]; some row of it beyond."""
    key = begin + tl.arange(0, BLOCK_N)
    return tl.load(p_table + key // SIZE, mask=key < stop, other=0).to(tl.int64) * SIZE + key % SIZE


@triton.jit
def _prefetch(x, at, WIDE: tl.constexpr):
    """Has rows `at` [BLOCK_N] of `[.., WIDE]` brought to L2, in lines of 128 bytes."""
    BYTES: tl.constexpr = WIDE * x.dtype.element_ty.primitive_bitwidth // 8
    line = tl.arange(0, (BYTES + 127) // 128)
    where = x.to(tl.int64) + at[:, None] * BYTES + line[None, :] * 128
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [where], tl.int32, False, 1)


@triton.jit
def _add_older(
    sums, q_key, q_rest, at, cache, p_table, start, stop, last, scale, S: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Adds keys start to stop, which every row sees, and finds where those behind them lie, below `last`: a tile ahead, as
    `at` [BLOCK_N] is where the first lie. MASK for a tile that is cut short."""
    KIND: tl.constexpr = S.KIND
    d = tl.arange(0, S.DIM)
    r = tl.arange(0, S.RANK)
    for begin in range(start, stop, BLOCK_N):
        p_k, p_v = cache.k + at[:, None] * S.DIM + d[None, :], cache.v + at[:, None] * S.RANK + r[None, :]
        k_scale = tl.zeros([BLOCK_N], tl.float32)
        v_scale = k_scale
        seen = True
        if MASK:
            ok = begin + tl.arange(0, BLOCK_N) < stop
            b_k, b_v = tl.load(p_k, mask=ok[:, None], other=0), tl.load(p_v, mask=ok[:, None], other=0)
            if KIND != "plain":
                k_scale = tl.load(cache.k_scale + at, mask=ok, other=0.0)
                v_scale = tl.load(cache.v_scale + at, mask=ok, other=0.0)
            seen = ok[None, :]
        else:
            b_k, b_v = tl.load(p_k), tl.load(p_v)
            if KIND != "plain":
                k_scale, v_scale = tl.load(cache.k_scale + at), tl.load(cache.v_scale + at)
        at = _rows(p_table, begin + BLOCK_N, last, S.SIZE, BLOCK_N)
        sums = _add_tile(sums, q_key, q_rest, (b_k, b_v, k_scale, v_scale), seen, scale, KIND, MASK, COMPUTE)
    return sums, at


@triton.jit
def _queries(q, row, row_ok, S: tl.constexpr, COMPUTE: tl.constexpr):
    """What meets a key's rotated part [M, DIM], and what meets its compressed one [M, RANK]."""
    p_q = q + row[:, None] * (S.DIM + S.RANK)
    d = tl.arange(0, S.DIM)
    r = tl.arange(0, S.RANK)
    q_key = tl.load(p_q + d[None, :], mask=row_ok[:, None], other=0.0).to(COMPUTE)
    return q_key, tl.load(p_q + S.DIM + r[None, :], mask=row_ok[:, None], other=0.0).to(COMPUTE)


@triton.jit
def _rotated_queries(q, row, row_ok, sin, cos, magnitude, S: tl.constexpr, STYLE: tl.constexpr, COMPUTE: tl.constexpr):
    """`_queries` of what is not rotated yet."""
    HALF: tl.constexpr = S.DIM // 2
    M: tl.constexpr = row.shape[0]
    at = row * (S.DIM + S.RANK)
    q_key = rotated(q, at, row_ok, sin, cos, magnitude, q, STYLE == "neox", M, HALF)
    r = tl.arange(0, S.RANK)
    q_rest = tl.load(q + at[:, None] + S.DIM + r[None, :], mask=row_ok[:, None], other=0.0)
    return q_key.to(COMPUTE), q_rest.to(COMPUTE)


@triton.jit
def _no_sums(M: tl.constexpr, RANK: tl.constexpr):
    acc = tl.zeros([M, RANK], tl.float32)
    return acc, tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)


@triton.jit
def _own_sums(q_key, q_rest, k_new, v_new, cache, slot, scale, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """Sums that begin with one key [DIM] and its value [RANK], as the cache has them."""
    key, value = as_values(k_new, KIND, COMPUTE).to(tl.float32), as_values(v_new, KIND, COMPUTE).to(tl.float32)
    if KIND != "plain":
        key, value = key * tl.load(cache.k_scale + slot), value * tl.load(cache.v_scale + slot)
    own = tl.sum(q_key.to(tl.float32) * key[None, :], 1) + tl.sum(q_rest.to(tl.float32) * value[None, :], 1)
    return tl.broadcast_to(value[None, :], q_rest.shape), own * scale, own * 0.0 + 1.0


@triton.jit(do_not_specialize=["seqs"])
def attend_latent_one(
    out, partial, q, append, cache, sequences, item_start, seqs, scale, S: tl.constexpr, ROTATE: tl.constexpr,
    NORMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr, COMPUTE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sequences with one new token; a program takes a split of one sequence's keys, for BLOCK_M heads.

    Grid (items, tiles of heads). Records are those of `records.py`, with keys `[blocks, 1, block_size, DIM]` and values
    `[.., RANK]`; sums of `partial` are RANK wide.

    out         act `[T, heads * RANK]`, of sequences with one split
    q           act `[T, heads * (DIM + RANK)]`, rotated unless ROTATE
    append      read with ROTATE only, its gain with NORMS only
    item_start  int32 `[S + 1]`, where each sequence's items begin
    ROTATE      the style of a rotation that this kernel does itself, with the append to the cache, or ""
    NORMS       it also normalises what is appended as values
    EARLY       nothing in this step writes older keys, so they are read before the kernel ahead is over
    """
    NEOX: tl.constexpr = ROTATE == "neox"
    KIND: tl.constexpr = S.KIND
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not EARLY:
            tl.extra.cuda.gdc_wait()
    item = tl.program_id(0)
    seq = find(item_start, seqs, item, 1)
    first_item = tl.load(item_start + seq)
    splits = tl.load(item_start + seq + 1) - first_item
    if item - first_item >= splits:
        return
    n_keys = tl.load(sequences.kv_len + seq)
    last = n_keys - 1
    split = split_of(n_keys, splits)
    start = (item - first_item) * split
    newest = start + split >= n_keys
    stop = tl.minimum(last, start + split)
    p_table = sequences.table + seq.to(tl.int64) * tl.load(sequences.table_width)
    older = _rows(p_table, start, stop, S.SIZE, BLOCK_N)
    if _ASM and EARLY:  # the first keys, while the queries are not there yet
        _prefetch(cache.k, older, S.DIM)
        _prefetch(cache.v, older, S.RANK)
    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    head_ok = head < S.HEADS
    token = tl.load(sequences.query_start + seq).to(tl.int64)
    row = token * S.HEADS + head
    d = tl.arange(0, S.DIM)
    r = tl.arange(0, S.RANK)
    if ROTATE != "":
        rotation = append.rotation
        angle = tl.load(rotation.positions + token).to(tl.float32) * tl.load(rotation.freq + tl.arange(0, S.DIM // 2))
        sin, cos = sin_cos(angle[None, :])
        slot = tl.load(rotation.slots + token).to(tl.int64)
    else:
        slot = tl.load(p_table + last // S.SIZE).to(tl.int64) * S.SIZE + last % S.SIZE
    if NORMS:
        gain = tl.load(append.gain + r)
    # What is above comes with the step, before its first kernel, or from earlier steps.
    if PDL and EARLY:
        tl.extra.cuda.gdc_wait()
    if ROTATE != "":
        v_new = tl.load(append.rotation.v + token * S.RANK + r)
        at = token * S.DIM + tl.arange(0, 1)
        k_new = rotated(rotation.k, at, at >= 0, sin, cos, rotation.k_magnitude, cache.k, NEOX, 1, S.DIM // 2)
        k_new = tl.reshape(k_new, (S.DIM,))
        q_key, q_rest = _rotated_queries(q, row, head_ok, sin, cos, rotation.q_magnitude, S, ROTATE, COMPUTE)
    else:
        k_new, v_new = tl.load(cache.k + slot * S.DIM + d), tl.load(cache.v + slot * S.RANK + r)
        q_key, q_rest = _queries(q, row, head_ok, S, COMPUTE)
    acc, top, total = _no_sums(BLOCK_M, S.RANK)
    if newest:
        if ROTATE != "":
            kept = v_new.to(tl.float32)
            if NORMS:
                kept = kept * (1.0 / tl.sqrt(tl.sum(kept * kept, 0) / S.RANK + append.eps)) * gain
            v_new = kept.to(cache.v.dtype.element_ty)
            tl.store(cache.k + slot * S.DIM + d, k_new)
            tl.store(cache.v + slot * S.RANK + r, v_new)
        acc, top, total = _own_sums(q_key, q_rest, k_new, v_new, cache, slot, scale, KIND, COMPUTE)
    whole = start + (stop - start) // BLOCK_N * BLOCK_N
    sums, older = _add_older(
        (acc, top, total), q_key, q_rest, older, cache, p_table, start, whole, stop, scale, S, BLOCK_N, False, COMPUTE
    )  # fmt: skip
    sums, _ = _add_older(
        sums, q_key, q_rest, older, cache, p_table, whole, stop, stop, scale, S, BLOCK_N, True, COMPUTE
    )  # fmt: skip
    acc, top, total = sums
    if splits == 1:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + row[:, None] * S.RANK + r[None, :], acc.to(out.dtype.element_ty), mask=head_ok[:, None])
    else:
        place = item.to(tl.int64) * S.HEADS + head
        tl.store(partial.sums + place[:, None] * S.RANK + r[None, :], acc, mask=head_ok[:, None])
        tl.store(partial.top_sum + place * 2, top, mask=head_ok)
        tl.store(partial.top_sum + place * 2 + 1, total, mask=head_ok)


@triton.jit
def combine_latent(out, partial, query_start, item_start, S: tl.constexpr, PDL: tl.constexpr):
    """Adds the splits of a sequence for one head. Grid (S, heads)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq = tl.program_id(0)
    head = tl.program_id(1)
    p_out = out + (tl.load(query_start + seq).to(tl.int64) * S.HEADS + head) * S.RANK
    combine_head(p_out, partial, item_start, seq, head, S.HEADS, S.RANK)


@triton.jit(do_not_specialize=["seqs"])
def attend_latent_many(
    out, q, cache, sequences, seqs, scale, S: tl.constexpr, BLOCK_M: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_N: tl.constexpr, LEAST: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Causal attention of sequences with LEAST new tokens or more, whose keys are in the cache already.

    Grid (tiles of queries: T // QUERIES + S, tiles of heads); a tile has QUERIES = BLOCK_M // TOGETHER queries with
    TOGETHER heads each, and rows that are left over. Arguments as those of `attend_latent_one`.
    """
    QUERIES: tl.constexpr = BLOCK_M // TOGETHER
    # The last queries have the most keys: they begin first.
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = find(sequences.query_start, seqs, item, QUERIES) if QUERIES > 1 else _found(sequences.query_start, seqs, item)
    begin = tl.load(sequences.query_start + seq)
    n_new = tl.load(sequences.query_start + seq + 1) - begin
    tile = item - (begin // QUERIES + seq)
    if (n_new < LEAST) | (tile * QUERIES >= n_new):
        return
    n_keys = tl.load(sequences.kv_len + seq)
    lane = tl.arange(0, BLOCK_M)
    query = tile * QUERIES + lane // TOGETHER
    head = tl.program_id(1) * TOGETHER + lane % TOGETHER
    row_ok = (query < n_new) & (lane < QUERIES * TOGETHER) & (head < S.HEADS)
    near = n_keys - n_new + tile * QUERIES  # the position of the tile's first query
    position = near + lane // TOGETHER  # [BLOCK_M]
    row = (begin + query).to(tl.int64) * S.HEADS + head  # [BLOCK_M]
    q_key, q_rest = _queries(q, row, row_ok, S, COMPUTE)
    p_table = sequences.table + seq.to(tl.int64) * tl.load(sequences.table_width)
    last = tl.minimum(n_keys, near + QUERIES)
    diagonal = (near + 1) // BLOCK_N * BLOCK_N
    sums = _no_sums(BLOCK_M, S.RANK)
    sums = _add_keys(
        sums, q_key, q_rest, cache, p_table, position, 0, diagonal, n_keys, scale, S, BLOCK_N, False, COMPUTE
    )  # fmt: skip
    acc, _, total = _add_keys(
        sums, q_key, q_rest, cache, p_table, position, diagonal, last, n_keys, scale, S, BLOCK_N, True, COMPUTE
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    r = tl.arange(0, S.RANK)
    tl.store(out + row[:, None] * S.RANK + r[None, :], acc.to(out.dtype.element_ty), mask=row_ok[:, None])


@triton.jit
def _found(starts, n, item):
    """`find` for tiles of one query: the last s below n with starts[s] + s <= item."""
    found = item * 0 - 1
    for begin in range(0, n, 64):
        i = begin + tl.arange(0, 64)
        at = tl.load(starts + i, mask=i < n, other=0) + i
        found += tl.sum(((at <= item) & (i < n)).to(tl.int32), 0)
    return found


def absent(q: torch.Tensor) -> Append:
    """For a step whose keys are in the cache."""
    return Append(Rotation(*(q,) * 5, 1.0, 1.0), q, 0.0)


def tiles(compute: Compute, heads: int, generation: int) -> tuple[Tile, Tile]:
    """For decode and for prefill, by the number of heads and the device alone."""
    if compute == "float32":
        # Products of float32 run on the plain units and hold whole rows in registers.
        return Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)
    rows = min(32, max(16, power_of_two(heads)))
    if generation != 9:  # less shared memory, and not measured: what spills nothing
        return Tile(rows, 32, 4 if rows == 16 else 8, 2), Tile(32, 32, 8, 2)
    # Spills cost less than they save: on an H200 8 warps, which spill nothing, take 143 us for 32 sequences of GLM-4.7
    # Flash with 4096 keys, 4 warps take 91; a prompt of 4096 tokens takes 5.8 ms in tiles of 32 by 32 and 1.7 in these.
    return Tile(rows, 32, 4, 2), Tile(64, 64, 8, 1)


@dataclass(frozen=True)
class Before:
    """The nodes whose work attention does in steps without prompts."""

    append: Node
    """A ROPE_APPEND."""
    norm: Node | None
    """Of its values."""

    def fits(self) -> bool:
        """Whether the kernel has such a rotation and such a norm."""
        spec: RopeAppendSpec = self.append.spec
        norm: NormSpec | None = None if self.norm is None else self.norm.spec
        return spec.q.axes == 1 and (norm is None or (norm.kind == "rms" and norm.groups == 1))

    def arguments(self, site: Site) -> Callable[[], tuple[torch.Tensor, Append]]:
        """Queries, and what is appended, at each call."""
        spec: RopeAppendSpec = self.append.spec
        q, k, v, positions, freq, slots = self.append.inputs[:6]
        v, gain = (v, None) if self.norm is None else self.norm.inputs[:2]
        arrays = [site.slot(i) for i in (q, k, v, positions, slots)]  # type: ignore[arg-type]
        table = site.const(freq)  # type: ignore[arg-type]
        weight = table if gain is None else site.vector(gain)  # type: ignore[arg-type]
        eps = 0.0 if self.norm is None else self.norm.spec.eps

        def at_call() -> tuple[torch.Tensor, Append]:
            q, k, v, positions, slots = (a.tensor for a in arrays)
            return q, Append(Rotation(k, v, positions, table, slots, spec.q.magnitude, spec.k.magnitude), weight, eps)

        return at_call


def appends(site: Site, node: Node) -> bool:
    """Whether an ATTENTION's cache takes keys and values as they are."""
    cache = site.cache(node.inputs[4])  # type: ignore[arg-type]
    return cache.k.dtype == DTYPES[site.compute]


def build_attention(site: Site, node: Node, before: Before | None = None, behind: Node | None = None) -> Launch:
    """ATTENTION: q `[T, heads * (head_dim + latent)]`, query_start `[S + 1]`, kv_len `[S]`, block_table `[S, B]`.

    With `before`, for steps without prompts; with `behind`, a HEAD_LINEAR of the result, for one token, and that too.
    """
    spec: AttentionSpec = node.spec
    q, query_start, kv_len, table = (site.slot(i) for i in node.inputs[:4])  # type: ignore[arg-type]
    cache, target = site.cache(node.inputs[4]), site.slot(node.outputs[0])  # type: ignore[arg-type]
    heads, rank = spec.n_heads, spec.latent
    part, top_sum = site.scratch("items", heads * rank), site.scratch("items", heads * 2)
    one, many = tiles(site.compute, heads, site.generation)
    # One sequence leaves most of the device idle: as few heads to a program as a product has rows, in twice the warps (six
    # layers of GLM-4.7-Flash 316 us on an H200 for 327 in four).
    alone = tiles(site.compute, 16, site.generation)[0]
    alone = replace(alone, warps=8) if site.generation == 9 else alone
    # A program to a head was made for Hopper alone; the interpreter has it too, for the tests.
    hopper = site.generation == 9 or INTERPRETED
    together = min(heads, many.rows)
    shape = LatentShape(heads, spec.head_dim, rank, cache.block_size, cache.kind)
    common: dict[str, Any] = {"cache": Keys(cache.k, cache.v, *cache.both_scales), "scale": spec.scale * LOG2E, "S": shape}
    common |= {"COMPUTE": TL_TYPES[site.compute]}
    by_prompts = site.deterministic or site.compute == "float32"
    left = None if before is None else before.arguments(site)
    style = "" if before is None else before.append.spec.q.style

    def partial() -> Partial:
        return Partial(part.tensor, top_sum.tensor, site.tables.item_start.tensor)

    values = None if behind is None else build_head_linear(site, behind, partial)

    def sequences() -> Sequences:
        return Sequences(query_start.tensor, kv_len.tensor, table.tensor, site.tables.table_width.tensor)

    def decode(batch: Batch) -> None:
        """The sequences with one new token."""
        starts = site.tables.item_start.tensor
        queries, append = (q.tensor, absent(q.tensor)) if left is None else left()
        kernel: Any
        if hopper and batch.T == 1 and batch.items * heads <= latent_head.HEAD_PROGRAMS:
            keys, warps = latent_head.TILE
            kernel, rows, stages, own = attend_latent_head, 1, 1, {"KEYS": keys // warps, "WARPS": warps}
        else:
            tile = alone if batch.S == 1 else one
            kernel, rows, warps, stages = attend_latent_one, tile.rows, tile.warps, tile.stages
            own = {"seqs": batch.S, "BLOCK_M": rows, "BLOCK_N": tile.keys, "EARLY": not batch.prefill}
        site.launch(
            kernel, (batch.items, cdiv(heads, rows)), out=target.tensor, partial=partial(), q=queries, append=append,
            sequences=sequences(), item_start=starts, **common, ROTATE=style,
            NORMS=before is not None and before.norm is not None, **own, warps=warps, stages=stages,
            early=starts_early(site),
        )  # fmt: skip
        if values is not None:
            values(batch)
            return
        site.launch(
            combine_latent, (batch.S, heads), out=target.tensor, partial=partial(), query_start=query_start.tensor,
            item_start=starts, S=shape, early=starts_early(site),
        )  # fmt: skip

    def prefill(batch: Batch) -> None:
        """The others, or all."""
        site.launch(
            attend_latent_many, (batch.T // (many.rows // together) + batch.S, cdiv(heads, together)), out=target.tensor,
            q=q.tensor, sequences=sequences(), seqs=batch.S, **common, BLOCK_M=many.rows, TOGETHER=together,
            BLOCK_N=many.keys, LEAST=1 if by_prompts else 2, warps=many.warps, stages=many.stages,
        )  # fmt: skip

    def run(batch: Batch) -> None:
        if batch.decode and not by_prompts:
            decode(batch)
        if batch.prefill or by_prompts:
            prefill(batch)

    return run


def _accepts(spec: AttentionSpec) -> str | None:
    if not spec.latent:
        return "needs values that the scores read too"
    if any(n < 16 or n != power_of_two(n) for n in (spec.head_dim, spec.latent)):
        return f"needs powers of two from 16 on, got keys of {spec.head_dim} and {spec.latent} values"
    if spec.n_kv != 1 or spec.window or spec.cap or spec.sinks or spec.scale <= 0:
        return f"needs one key head and neither window, cap nor sinks, got {spec}"
    return None


IMPLEMENTATIONS = (Implementation(ATTENTION, "compressed keys, split", build_attention, _accepts),)
