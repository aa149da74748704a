"""Attention over the paged cache, and writing to it.

A cache is blocks of `block_size` tokens, `[C, block_size, n_kv, head_dim]` for keys, and for values as wide, or `latent`
wide. Token i of sequence s lives in block `block_table[s, i // block_size]` at offset `i % block_size`. Queries are ragged:
sequence s owns rows `query_start[s]:query_start[s + 1]`, and its last row is its newest token, at position `kv_len[s] - 1`.

    score(q, k) = scale * q . k, then cap * tanh(score / cap) if there is a cap
    visible     = pos_k <= pos_q, and pos_q - pos_k < window if there is a window, or with `chunked` (Llama 4)
                  pos_k // window = pos_q // window
                  with `spans`, pos_k <= see_to[q] in the place of the first: an image's tokens see its later ones
    out         = softmax over the visible keys; a sink adds exp(sink_h) to the denominator only

With `latent` values (DeepSeek's multi-head latent attention in its absorbed form) a query head holds head_dim numbers and
as many more as a value is wide, and reads the value as the rest of its key:

    score(q, k, v) = scale * (q[:head_dim] . k + q[head_dim:] . v)

Query head h reads key head h // (n_heads / n_kv). Softmax and sums are in float32 or wider. No visible key gives 0, but
for a sequence's only query, which has one in every step but those that are padded, and whose row nobody reads there.
A row of the cache that none of a sequence's queries sees may hold another's NaN: it enters no sum, not even times zero.
What an append keeps of a key is said in `ops/kv.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import (
    Array,
    CacheRef,
    Case,
    Concrete,
    ConstRef,
    KVArrays,
    Op,
    Operand,
    Param,
    RawWeight,
    Value,
    WeightRef,
)
from quarrel.ops.kv import KV_TYPES, KVType, stored
from quarrel.ops.null import Builder
from quarrel.ops.rope import ROPE, RopeSpec, draw_rotation, rotated_by

_SCALED: tuple[KVType, ...] = ("int8", "fp8", "fp8_e5m2")
POISON = np.array([np.nan, np.inf, -np.inf, 1e38, -1e38], np.float32)
"""What a case has where nothing may be read."""


@dataclass(frozen=True)
class KVAppendSpec:
    """Shape of what one token adds."""

    n_kv: int
    head_dim: int
    latent: int = 0

    @property
    def width(self) -> int:
        return self.n_kv * self.head_dim

    @property
    def value_width(self) -> int:
        return self.n_kv * (self.latent or self.head_dim)


def kv_append_reference(s: KVAppendSpec, k: Array, v: Array, slots: Array, cache: KVArrays) -> tuple[KVArrays]:
    """NumPy body: the new cache; the old one is left alone."""
    new = []
    for kept, rows in ((cache.k, k), (cache.v, v)):
        heads = kept.copy().reshape(-1, *kept.shape[2:])
        heads[slots] = stored(rows.reshape(-1, *kept.shape[2:]), cache.type)
        new.append(heads.reshape(kept.shape))
    return (KVArrays(new[0], new[1], cache.type),)


def _make_append(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    """With `broken` one key and one value have a number that is not finite."""
    s: KVAppendSpec = case.spec
    t, size, blocks = case.dims["T"], case.dims["block_size"], case.dims["C"]
    slots = rng.permutation(size * blocks)[:t].astype(np.int32)
    k, v = draw.activations(rng, t, s.width), draw.activations(rng, t, s.value_width)
    if case.dims.get("broken"):
        k[t // 2, s.width - 3], v[t // 3, 7] = np.nan, np.inf
    return k, v, slots, _draw_cache(rng, blocks, size, s, case)


def _append_strategy() -> Any:
    from hypothesis import strategies as st

    def case(n_kv: int, dim: int, latent: int, size: int, blocks: int, share: float) -> Case:
        dims = {"T": max(1, int(size * blocks * share)), "block_size": size, "C": blocks}
        return Case(KVAppendSpec(n_kv, dim, latent), dims)

    dims = (st.sampled_from([16, 64, 80, 128]), st.sampled_from([0, 48, 512]))
    sizes = (st.integers(1, 4), *dims, st.sampled_from([16, 32]), st.integers(1, 4))
    return st.builds(case, *sizes, st.floats(0.0, 1.0))


KV_APPEND = Op(
    "kv_append",
    KVAppendSpec,
    lambda s: (
        Param("k", "act", "T width"),
        Param("v", "act", "T value_width"),
        Param("slots", "i32", "T"),
        Param("cache", "cache"),
    ),
    lambda s: (),
    reference=kv_append_reference,
    make=_make_append,
    strategy=_append_strategy,
    consumes="cache",
    cases=lambda: [
        Case(KVAppendSpec(2, 64), {"T": 5, "block_size": 16, "C": 3}),
        Case(KVAppendSpec(3, 80), {"T": 1, "block_size": 32, "C": 2}),
        Case(KVAppendSpec(1, 32), {"T": 64, "block_size": 32, "C": 2}, "every slot"),
        Case(KVAppendSpec(1, 64, 512), {"T": 5, "block_size": 16, "C": 2}, "latent"),
        *(Case(KVAppendSpec(2, 80), {"T": 7, "block_size": 16, "C": 3, "kv": KV_TYPES.index(t)}, t) for t in _SCALED),
        *(
            Case(KVAppendSpec(3, 80), {"T": 9, "block_size": 16, "C": 3, "kv": KV_TYPES.index(t), "broken": 1}, f"{t}, NaN")
            for t in _SCALED
        ),
    ],
)


@dataclass(frozen=True)
class AttentionSpec:
    """Static facts of one layer's attention. `window` and `cap` are off at 0; with `chunked` windows stand side by side,
    and a query sees the keys of its own."""

    n_heads: int
    n_kv: int
    head_dim: int
    scale: float
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    latent: int = 0
    """Width of values that are the rest of the keys too; 0 for values by themselves, as wide as keys."""
    chunked: bool = False
    spans: bool = False
    """Each query says up to which position it sees; a sequence's only query sees up to its own."""

    @property
    def width(self) -> int:
        return self.n_heads * (self.head_dim + self.latent)

    @property
    def out_width(self) -> int:
        return self.n_heads * (self.latent or self.head_dim)


def attention_params(s: AttentionSpec) -> tuple[Param, ...]:
    sinks = (Param("sinks", "weight", "n_heads"),) if s.sinks else ()
    return (
        Param("q", "act", "T width"),
        Param("query_start", "i32", "S1"),
        Param("kv_len", "i32", "S"),
        Param("block_table", "i32", "S B"),
        Param("cache", "cache"),
        *sinks,
        *((Param("see_to", "i32", "T"),) if s.spans else ()),
    )


def attention_reference(
    s: AttentionSpec,
    q: Array,
    query_start: Array,
    kv_len: Array,
    block_table: Array,
    cache: KVArrays,
    *rest: Any,
) -> tuple[Array]:
    """NumPy body, in float64, one sequence at a time."""
    sinks: RawWeight | None = rest[0] if s.sinks else None
    size, group = cache.k.shape[1], s.n_heads // s.n_kv
    out = np.zeros((len(q), s.n_heads, s.latent or s.head_dim))
    sink = None if sinks is None else sinks.dense().reshape(-1).astype(np.float64)
    for row, n in enumerate(kv_len):
        start, end = int(query_start[row]), int(query_start[row + 1])
        blocks = block_table[row, : -(-int(n) // size)]
        keys, values = (np.repeat(a[blocks].reshape(-1, *a.shape[2:])[:n], group, 1) for a in (cache.k, cache.v))
        first = _first_seen(s, int(n), end - start)
        keys[:first] = values[:first] = 0
        if s.latent:
            keys = np.concatenate([keys, values], -1)
        queries = q[start:end].reshape(-1, s.n_heads, s.head_dim + s.latent).astype(np.float64)
        score = np.einsum("qhd,khd->hqk", queries, keys) * s.scale
        if s.cap:
            score = s.cap * np.tanh(score / s.cap)
        back = (np.arange(n - (end - start), n)[:, None]) - np.arange(n)  # [queries, keys], how far back a key is
        ahead = back < 0 if not s.spans else np.arange(n) > rest[-1][start:end, None]
        hidden = ahead | (np.arange(n) < _oldest(s, np.arange(n - (end - start), n))[:, None])
        score = np.where(hidden, -np.inf, score)
        top = score.max(-1, keepdims=True, initial=-np.inf)
        if sink is not None:
            top = np.maximum(top, sink[:, None, None])
        p = np.exp(score - np.where(np.isfinite(top), top, 0.0))
        total = p.sum(-1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink[:, None, None] - top)
        out[start:end] = np.einsum("hqk,khd->qhd", p / np.where(total > 0, total, 1.0), values)
    return (out.reshape(len(q), s.out_width).astype(np.float32),)


def _oldest(s: AttentionSpec, position: Array) -> Array:
    """The first key that queries at these positions see."""
    if s.chunked:
        return position // s.window * s.window
    return np.maximum(position + 1 - s.window, 0) if s.window else np.zeros_like(position)


def _first_seen(s: AttentionSpec, n: int, new: int) -> int:
    """The oldest of a sequence's n keys that the first of its `new` queries sees."""
    return min(n, int(_oldest(s, np.array(n - new))))


def _draw_cache(rng: np.random.Generator, blocks: int, size: int, s: KVAppendSpec | AttentionSpec, case: Case) -> KVArrays:
    """`case.dims["kv"]` is the cache's type, as an index into KV_TYPES."""
    type = KV_TYPES[case.dims.get("kv", 0)]
    dims = (s.head_dim, s.latent or s.head_dim)
    k, v = (stored(draw.activations(rng, blocks, size, s.n_kv, dim), type) for dim in dims)
    return KVArrays(k, v, type)


def _poisoned(rng: np.random.Generator, cache: KVArrays, seen: Array) -> KVArrays:
    """The cache with NaN, infinities and 1e38 in every row but those in `seen` `[C, block_size]`."""
    k, v = (
        np.where(seen[..., None, None], a, stored(rng.choice(POISON, (*seen.shape, 1, 1)), cache.type))
        for a in (cache.k, cache.v)
    )
    return KVArrays(k, v, cache.type)


def _make_attention(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    """Ragged sequences: up to `Q` new tokens after up to `KV` cached ones, blocks in random order. Sequences begin
    with the `shared` blocks of the first. Rows that no query sees are as another sequence may have left them. With
    `keyless` the last sequence has queries and no key, as one that pads a step."""
    s: AttentionSpec = case.spec
    seqs, size = case.dims["S"], case.dims["block_size"]
    new = rng.integers(1, case.dims["Q"] + 1, seqs)
    new[0] = case.dims["Q"]
    kv_len = (new + rng.integers(0, case.dims["KV"] + 1, seqs)).astype(np.int32)
    kv_len[0] = new[0] + case.dims["KV"]
    if case.dims.get("keyless"):
        new[-1], kv_len[-1] = case.dims["Q"], 0
    width = int(-(-kv_len.max() // size))
    table = rng.permutation(seqs * width).reshape(seqs, width).astype(np.int32)
    table[1:, : case.dims.get("shared", 0)] = table[0, : case.dims.get("shared", 0)]
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    sinks = (draw.weight(rng, GGMLType.F32, 1, s.n_heads, 1.0),) if s.sinks else ()
    q = draw.activations(rng, int(new.sum()), s.width) * 2
    cache = _draw_cache(rng, seqs * width + 1, size, s, case)
    seen = np.zeros(cache.k.shape[:2], bool)
    for row, n in enumerate(kv_len):
        at = np.arange(_first_seen(s, int(n), int(new[row])), n)
        seen[table[row, at // size], at % size] = True
    spans = (_draw_spans(rng, new, kv_len),) if s.spans else ()
    return (q, starts, kv_len, table, _poisoned(rng, cache, seen), *sinks, *spans)


def _draw_spans(rng: np.random.Generator, new: Array, kv_len: Array) -> Array:
    """What each query sees up to: about half of them lie in spans, and see their span's last."""
    see_to: list[int] = []
    for count, n in zip(new, kv_len):
        position = at = int(n - count)
        while at < n:
            end = min(int(at + rng.integers(1, 40)), int(n))
            see_to += [end - 1] * (end - at) if rng.integers(2) or at == position else range(at, end)
            at = end
    return np.array(see_to, np.int32)


def _attention_strategy() -> Any:
    from hypothesis import strategies as st

    def case(
        kv: int,
        group: int,
        dim: int,
        window: int,
        cap: float,
        sinks: bool,
        chunked: bool,
        spans: bool,
        s: int,
        q: int,
        n: int,
        size: int,
    ) -> Case:
        chunked = chunked and window > 0
        spec = AttentionSpec(
            kv * group, kv, dim, dim**-0.5, window, cap, sinks, chunked=chunked, spans=spans and not chunked
        )
        return Case(spec, {"S": s, "Q": q, "KV": n, "block_size": size})

    def latent(heads: int, dim: int, latent: int, s: int, q: int, n: int, size: int) -> Case:
        spec = AttentionSpec(heads, 1, dim, (dim + latent) ** -0.5, latent=latent)
        return Case(spec, {"S": s, "Q": q, "KV": n, "block_size": size})

    ragged = (st.integers(1, 4), st.integers(1, 20), st.integers(0, 90), st.sampled_from([16, 32]))
    shared = (st.integers(1, 40), st.sampled_from([16, 32, 64]), st.sampled_from([32, 64, 128]))
    return st.builds(latent, *shared, *ragged) | st.builds(
        case,
        st.integers(1, 3),
        st.sampled_from([1, 2, 3, 4, 7, 8]),
        st.sampled_from([16, 32, 64, 80, 96, 128]),
        st.sampled_from([0, 1, 5, 33]),
        st.sampled_from([0.0, 20.0]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        *ragged,
    )


def _kv_case(spec: AttentionSpec, type: KVType, seqs: int, new: int, past: int) -> Case:
    return Case(spec, {"S": seqs, "Q": new, "KV": past, "block_size": 32, "kv": KV_TYPES.index(type)}, type)


_KEYLESS = (
    AttentionSpec(4, 2, 64, 0.125),
    AttentionSpec(4, 1, 96, 0.1, window=17, sinks=True),
    AttentionSpec(5, 1, 32, 0.112, latent=64),
)

ATTENTION = Op(
    "attention",
    AttentionSpec,
    attention_params,
    lambda s: (Param("y", "act", "T out_width"),),
    reference=attention_reference,
    make=_make_attention,
    strategy=_attention_strategy,
    cases=lambda: [
        Case(AttentionSpec(4, 4, 64, 0.125), {"S": 1, "Q": 1, "KV": 0, "block_size": 16}, "first token"),
        Case(AttentionSpec(8, 2, 64, 0.125), {"S": 3, "Q": 1, "KV": 100, "block_size": 32}, "decode, GQA 4"),
        Case(AttentionSpec(7, 1, 128, 0.088), {"S": 2, "Q": 5, "KV": 33, "block_size": 16}, "GQA 7"),
        Case(AttentionSpec(4, 2, 80, 0.1, window=5), {"S": 2, "Q": 9, "KV": 40, "block_size": 16}, "window"),
        Case(AttentionSpec(4, 2, 96, 0.1, cap=15.0), {"S": 2, "Q": 33, "KV": 0, "block_size": 32}, "prefill, cap"),
        Case(AttentionSpec(8, 2, 64, 0.125, window=17, sinks=True), {"S": 2, "Q": 7, "KV": 50, "block_size": 32}, "sinks"),
        Case(AttentionSpec(2, 1, 256, 0.0625), {"S": 1, "Q": 70, "KV": 600, "block_size": 32}, "long, head_dim 256"),
        Case(AttentionSpec(2, 2, 80, 0.11, window=19), {"S": 2, "Q": 1, "KV": 40, "block_size": 16}, "decode, window"),
        Case(AttentionSpec(7, 1, 96, 0.1, cap=10.0), {"S": 2, "Q": 1, "KV": 40, "block_size": 16}, "decode, cap"),
        Case(AttentionSpec(8, 1, 128, 0.088, sinks=True), {"S": 2, "Q": 1, "KV": 40, "block_size": 16}, "decode, sinks"),
        Case(AttentionSpec(5, 1, 256, 0.0625), {"S": 2, "Q": 1, "KV": 40, "block_size": 32}, "decode, head_dim 256"),
        Case(AttentionSpec(4, 2, 512, 0.05), {"S": 2, "Q": 9, "KV": 20, "block_size": 16}, "head_dim 512"),
        Case(AttentionSpec(4, 2, 512, 0.05), {"S": 2, "Q": 1, "KV": 140, "block_size": 16}, "decode, head_dim 512"),
        Case(AttentionSpec(4, 2, 128, 0.1), {"S": 3, "Q": 3, "KV": 70, "block_size": 16, "shared": 2}, "shared blocks"),
        Case(AttentionSpec(4, 2, 64, 0.125, window=37), {"S": 3, "Q": 70, "KV": 150, "block_size": 32}, "prefill, window"),
        Case(AttentionSpec(4, 2, 64, 0.125, window=36), {"S": 2, "Q": 1, "KV": 99, "block_size": 16}, "window from 64 on"),
        Case(AttentionSpec(20, 1, 64, 0.1, latent=512), {"S": 3, "Q": 1, "KV": 150, "block_size": 16}, "latent, decode"),
        Case(AttentionSpec(3, 1, 16, 0.2, latent=32), {"S": 3, "Q": 33, "KV": 70, "block_size": 32}, "latent, prefill"),
        Case(AttentionSpec(40, 1, 32, 0.1, latent=64), {"S": 2, "Q": 5, "KV": 0, "block_size": 16}, "latent, many heads"),
        Case(AttentionSpec(5, 1, 16, 0.2, latent=32), {"S": 9, "Q": 2, "KV": 70, "block_size": 16}, "latent, one or two"),
        Case(AttentionSpec(4, 2, 64, 0.125, spans=True), {"S": 3, "Q": 70, "KV": 90, "block_size": 16}, "spans"),
        Case(AttentionSpec(4, 1, 80, 0.1, 17, spans=True), {"S": 2, "Q": 90, "KV": 40, "block_size": 32}, "spans, window"),
        Case(AttentionSpec(4, 1, 256, 0.1, 40, spans=True), {"S": 2, "Q": 50, "KV": 40, "block_size": 32}, "spans, wide"),
        Case(AttentionSpec(4, 2, 64, 0.125, 24, chunked=True), {"S": 2, "Q": 70, "KV": 90, "block_size": 16}, "chunks"),
        Case(
            AttentionSpec(4, 1, 64, 0.125, 64, chunked=True),
            {"S": 3, "Q": 1, "KV": 127, "block_size": 16},
            "decode, chunks",
        ),
        *(Case(s, {"S": 3, "Q": 9, "KV": 40, "block_size": 16, "keyless": 1}, "no key") for s in _KEYLESS),
        *(_kv_case(AttentionSpec(8, 2, 80, 0.112, window=40), t, 3, 1, 150) for t in _SCALED),
        *(_kv_case(AttentionSpec(5, 1, 32, 0.112, latent=64), t, 3, 2, 60) for t in _SCALED),
        *(_kv_case(AttentionSpec(4, 2, 64, 0.125, cap=15.0), t, 2, 33, 40) for t in _SCALED),
    ],
)


@dataclass(frozen=True)
class RopeAppendSpec:
    """Rotation of query and key, and the append, in one: what stands between the projections and the attention."""

    q: RopeSpec
    k: RopeSpec
    latent: int = 0
    """Width of the values, if the scores read them too; a query head is so much wider than a key."""

    @property
    def append(self) -> KVAppendSpec:
        return KVAppendSpec(self.k.n_heads, self.k.head_dim, self.latent)


def _rope_append_params(s: RopeAppendSpec) -> tuple[Param, ...]:
    return (
        Param("q", "act", f"T {s.q.width}"),
        Param("k", "act", f"T {s.k.width}"),
        Param("v", "act", f"T {s.append.value_width}"),
        s.q.positions,
        Param("freq", "const", str(s.q.n_freq)),
        Param("slots", "i32", "T"),
        Param("cache", "cache"),
    )


def _rope_append_expand(b: Builder, s: RopeAppendSpec, inputs: Sequence[Operand]) -> Sequence[Value]:
    q, k, v, positions, freq, slots, cache = inputs
    (rotated,) = b.emit(ROPE, s.q, q, positions, freq)
    (key,) = b.emit(ROPE, s.k, k, positions, freq)
    b.emit(KV_APPEND, s.append, key, v, slots, cache)
    return (rotated,)


def _make_rope_append(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: RopeAppendSpec = case.spec
    _, v, slots, cache = _make_append(Case(s.append, case.dims), rng)
    t = case.dims["T"]
    positions, freq = draw_rotation(rng, s.q, t, 500)
    return draw.activations(rng, t, s.q.width), draw.activations(rng, t, s.k.width), v, positions, freq, slots, cache


def _rope_append_strategy() -> Any:
    from hypothesis import strategies as st

    def case(style: Literal["norm", "neox"], n_kv: int, group: int, dim: int, half: int, axes: int, t: int) -> Case:
        q, k = (RopeSpec(style, n, dim, 2 * half, 1.25, axes) for n in (n_kv * group, n_kv))
        return Case(RopeAppendSpec(q, k), {"T": t, "block_size": 16, "C": 2})

    sizes = (st.integers(1, 3), st.integers(1, 4), st.sampled_from([32, 64, 80]), st.integers(1, 16))
    ends = (st.sampled_from([1, 3]), st.integers(1, 9))
    return st.builds(case, st.sampled_from(["norm", "neox"]), *sizes, *ends)


def _rope_case(style: Literal["norm", "neox"], dim: int, rot: int, type: KVType) -> Case:
    spec = RopeAppendSpec(RopeSpec(style, 4, dim, rot, 1.25), RopeSpec(style, 2, dim, rot, 1.25))
    return Case(spec, {"T": 9, "block_size": 16, "C": 2, "kv": KV_TYPES.index(type)}, type)


ROPE_APPEND = Op(
    "rope_append",
    RopeAppendSpec,
    _rope_append_params,
    lambda s: (Param("q", "act", f"T {s.q.width}"),),
    expand=_rope_append_expand,
    make=_make_rope_append,
    strategy=_rope_append_strategy,
    consumes="cache",
    cases=lambda: [
        Case(RopeAppendSpec(RopeSpec("norm", 4, 64, 64), RopeSpec("norm", 2, 64, 64)), {"T": 5, "block_size": 16, "C": 2}),
        Case(RopeAppendSpec(RopeSpec("neox", 3, 80, 40), RopeSpec("neox", 3, 80, 40)), {"T": 1, "block_size": 16, "C": 2}),
        Case(
            RopeAppendSpec(RopeSpec("norm", 3, 80, 16), RopeSpec("norm", 1, 16, 16), 64),
            {"T": 5, "block_size": 16, "C": 2},
            "latent",
        ),
        Case(
            RopeAppendSpec(RopeSpec("neox", 4, 64, 24, axes=3), RopeSpec("neox", 2, 64, 24, axes=3)),
            {"T": 5, "block_size": 16, "C": 2},
            "three axes",
        ),
        *(_rope_case("neox", 80, 40, t) for t in _SCALED),
        *(_rope_case("norm", 64, 64, t) for t in _SCALED),
    ],
)


def rope_append(b: Builder, spec: RopeAppendSpec, q: Value, k: Value, v: Value, freq: ConstRef, cache: CacheRef) -> Value:
    """Rotates query and key, appends key and value to the cache; returns the rotated query."""
    return b.emit(ROPE_APPEND, spec, q, k, v, rotated_by(b, spec.q), freq, b.input("slots"), cache)[0]


def kv_append(b: Builder, spec: KVAppendSpec, k: Value, v: Value, cache: CacheRef) -> None:
    """Appends key and value as they are (layers without rotation)."""
    b.emit(KV_APPEND, spec, k, v, b.input("slots"), cache)


def attention(b: Builder, spec: AttentionSpec, q: Value, cache: CacheRef, sinks: WeightRef | None = None) -> Value:
    """`[T, out_width]` of the step's queries over the cache."""
    rest: tuple[Operand, ...] = () if sinks is None else (sinks,)
    if spec.spans:
        rest = (*rest, b.input("see_to"))
    return b.emit(ATTENTION, spec, q, b.input("query_start"), b.input("kv_len"), b.input("block_table"), cache, *rest)[0]
