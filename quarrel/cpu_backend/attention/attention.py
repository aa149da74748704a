"""Attention over the paged cache, in splits of 256 keys.

One chunk is a block of queries of one sequence for one key/value head; all query heads of the group share its keys. For
every split that any of its queries sees, the keys are unpacked to a float32 tile with one key per lane and the values
to float32 rows, once for all queries; then, in the order of positions,

    s = scale * q . k  (capped, masked)     m = max s     p = exp(s - m)     l = sum p     o = sum p v
    M' = max(M, m)      L = L exp(M - M') + l exp(m - M')      O = O exp(M - M') + o exp(m - M')

Where scores read the values too (`latent`), these are rows of the key tile as well, behind the keys' own.

A few query rows, as in decoding, read keys and values in the cache (`direct.py`). Codes of int8 are multiplied as whole
numbers where an instruction does that (`integer.py`), however many rows there are.

Splits are cut at fixed positions and summed in order, so a query's result does not depend on its block or its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from quarrel.cpu_backend.attention import direct, integer
from quarrel.cpu_backend.attention.cache import head_bytes
from quarrel.cpu_backend.attention.direct import by_rows
from quarrel.cpu_backend.attention.shape import KEYS, SPLIT, Shape
from quarrel.cpu_backend.attention.source import Keys, Source
from quarrel.cpu_backend.attention.split import merge, scale_weights, scores, softmax, weigh_values
from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.plan import Header, Live
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I32, I64, Kernel, Val
from quarrel.cpu_backend.runtime.vector import F32x16, exp, transpose16
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Value
from quarrel.ops.encode import ENCODE
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation


def plan(queries: int, causal: bool = True) -> KernelDef:
    """Cuts every sequence's queries into blocks: (sequence, first row, rows, position of the first), and their number."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        count = k.var(k.i64(0))
        with k.range(0, a.live_seqs) as s:
            start, end = (k.load(a.query_start + (s << 2), I32, 4 * i).to(I64) for i in range(2))
            position = k.load(a.kv_len + (s << 2), I32).to(I64) - (end - start) if causal else k.i64(0)
            with k.range(start, end, queries) as row:
                item = a.items + (count.v << 5)
                words = (s, row, k.minimum(end - row, queries), position + row - start)
                for i, word in enumerate(words):
                    k.store(word, item, 8 * i)
                count.v = count.v + 1
        k.store(count.v, a.count)

    fields = ("live_seqs", "query_start", *(("kv_len",) if causal else ()), "items", "count")
    return KernelDef(f"attention/plan/{queries}{'' if causal else '/all'}", fields, body)


def _scratch_layout(s: Shape) -> tuple[dict[str, int], int]:
    """Offsets of a chunk's working arrays, and their size in all."""
    d, v, r = s.padded, s.value_padded, s.rows
    sizes = {"q": r * d, "k": d * SPLIT, "v": v * SPLIT, "p": r * SPLIT, "o": r * v, "m": r, "l": r, "a": r, "b": r}
    sizes["s"] = direct.MOST_ROWS * v if direct.takes(s) else 0
    sizes["scales"] = SPLIT if s.folds else 0
    if s.integers:
        sizes |= {"q": r * integer.query_bytes(s) // 4, "k": integer.tile_bytes(s) // 4}
        sizes |= {"v": r * integer.WEIGHTS // 4, "s": r * v}
    at, places = 0, {}
    for name, count in sizes.items():
        places[name] = at
        at += -(-4 * count // 64) * 64
    return places, at


def _unpack_keys(
    k: Kernel, level: Level, keys: Source, values: Source, start: Val, first: Val, count: Val, out: Val
) -> None:
    """float32 keys `first`.. of a split as `[query_dim, SPLIT]`, sixteen at a time. Prefetches what is needed next."""
    last = start + count - 1
    in_rows = [] if isinstance(keys, Keys) else [(keys, 0)]
    in_rows += [(values, keys.dim)] if keys.s.latent else []
    with k.range(first, count, 16) as j:
        values.prefetch(k, values.sixteen(k, start + j, last))
        if isinstance(keys, Keys):
            keys.prefetch_part(k, start + j, last, 0, 1, locality=3)
            columns = keys.columns(k, start + j)
            scales = None if keys.s.folds else keys.scales(k, columns)
            with k.range(0, keys.dim) as d:
                column = keys.column(k, level, columns, d)
                k.store(column if scales is None else column * scales, out + (j << 2) + d * (4 * SPLIT))
        else:
            keys.prefetch(k, keys.sixteen(k, k.minimum(start + j + 16, last & -16), last))
        for source, below in in_rows:
            rows = source.sixteen(k, start + j, last)
            at, whole = out + (j << 2) + 4 * SPLIT * below, source.dim & -16
            with k.range(0, whole, 16) as d:
                for i, column in enumerate(transpose16([source.whole(k, level, row, d) for row in rows])):
                    k.store(column, at + d * (4 * SPLIT), 4 * SPLIT * i)
            if whole < source.dim:
                for i, column in enumerate(transpose16([source.load(k, level, row, whole) for row in rows])):
                    k.store(column, at, 4 * SPLIT * (whole + i))


def _unpack_values(k: Kernel, level: Level, values: Source, start: Val, low: Val, count: Val, out: Val) -> None:
    """float32 values as `[SPLIT, dim]`, whole steps of KEYS; rows before `low` and from `count` on, which no query sees,
    are zero, whatever the cache holds."""
    padded = values.s.value_padded
    with k.range(low, count) as j:
        row = values.at(k, start + j)
        for d in range(0, padded, 16):
            k.store(values.load(k, level, row, d), out + j * (4 * padded), 4 * d)
    for first, end in ((low & -KEYS, low), (count, (count + KEYS - 1) & -KEYS)):
        with k.range(first, end) as j:
            for d in range(0, padded, 16):
                k.store(k.zero(F32x16), out + j * (4 * padded), 4 * d)


def _copy_scales(k: Kernel, keys: Source, start: Val, span: tuple[Val, Val], out: Val) -> None:
    """Scales of the split's keys span[0] .. span[1] - 1."""
    assert isinstance(keys, Keys)
    with k.range(*span, 16) as j:
        scales = keys.scales(k, keys.columns(k, start + j))
        assert scales is not None
        k.store(scales, out + (j << 2))


def _scaled_copy(k: Kernel, dim: int, source: Val, to: Val, factor: Val) -> None:
    """`dim` values times a factor."""
    for d in range(0, dim & -16, 16):
        k.store(k.load(source, F32x16, 4 * d) * k.splat(factor, 16), to, 4 * d)
    for d in range(dim & -16, dim):
        k.store(k.load(source, F32, 4 * d) * factor, to, 4 * d)


def _sources(k: Kernel, s: Shape, a: Fields, seq: Val, head: Val) -> tuple[Source, Source]:
    """Keys and values of a sequence for one head."""
    if s.causal:
        table = a.block_table + seq * (a.live_blocks << 2)
        return Keys(s, a.k_cache, table, head, s.dim), Source(s, a.v_cache, table, head, s.value_dim)
    skipped = k.load(a.query_start + (seq << 2), I32).to(I64) * (s.n_kv * head_bytes(s.kind, s.dim))
    return Source(s, a.k_cache + skipped, None, head, s.dim), Source(s, a.v_cache + skipped, None, head, s.dim)


def _oldest(k: Kernel, s: Shape, position: Val) -> Val:
    """The first key that a query at this position sees."""
    if s.chunked:
        return position.udiv(s.window) * s.window
    return k.maximum(position - (s.window - 1), 0) if s.window else k.i64(0)


def _visible(k: Kernel, s: Shape, a: Fields, seq: Val, position: Val, queries: Val) -> tuple[Val, Val]:
    """The keys that any of a chunk's queries sees."""
    if not s.causal:
        start, end = (k.load(a.query_start + (seq << 2), I32, 4 * i).to(I64) for i in range(2))
        if s.reach:
            return k.maximum(position - s.reach, 0), k.minimum(position + queries + s.reach, end - start)
        return k.i64(0), end - start
    return _oldest(k, s, position), position + queries


def _seen_to(k: Kernel, a: Fields, row: Val) -> Val:
    """The end of the keys that the query in this row of the step sees."""
    return k.load(a.see_to + (row << 2), I32).to(I64) + 1


def _one_way(
    k: Kernel,
    s: Shape,
    rows: Val,
    integers: Callable[[], None],
    in_cache: Callable[[], None],
    unpacked: Callable[[], None],
) -> None:
    """Integers, where the shape says so; otherwise a few query rows read the cache, if the layer can be read so, and more
    of them what was unpacked once for all."""
    if s.integers or not direct.takes(s):
        (integers if s.integers else unpacked)()
        return
    with k.either(rows <= direct.MOST_ROWS) as (yes, no):
        with yes:
            in_cache()
        with no:
            unpacked()


def attention(s: Shape, level: Level) -> KernelDef:
    """Chunk c is head c % n_kv of a planned item, the last item first (under a causal mask it has the most keys)."""
    places, scratch_bytes = _scratch_layout(s)
    at_q, at_k, at_v, at_p, at_o, at_m, at_l, at_a, at_b, at_s, at_scales = places.values()
    q_bytes, o_bytes = integer.query_bytes(s) if s.integers else 4 * s.padded, 4 * s.value_padded
    heads = s.group * s.n_kv
    widest = 4 if level.registers >= 32 else 2

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        item = a.items + (a.live_items - 1 - chunk.udiv(s.n_kv) << 5)
        head = chunk - chunk.udiv(s.n_kv) * s.n_kv
        seq, first_row, queries, position = (k.load(item, I64, 8 * i) for i in range(4))
        rows = queries * s.group
        keys, values = _sources(k, s, a, seq, head)

        def place(r: Val, x: Val, dim: int) -> Val:
            """Address of row r (query r // group, head r % group) in an array `[T, heads, dim]`."""
            query = r.udiv(s.group)
            return x + (((first_row + query) * heads + head * s.group + (r - query * s.group)) * (4 * dim))

        with k.range(0, rows) as r:
            source, to, o = place(r, a.q, s.query_dim), scratch + at_q + r * q_bytes, scratch + at_o + r * o_bytes
            if s.integers:
                integer.store_query(k, s, source, to)
            else:
                _scaled_copy(k, s.query_dim, source, to, k.f32(s.scale))
            for d in range(0, s.value_padded, 16):
                k.store(k.zero(F32x16), o, 4 * d)
            k.store(k.f32(-math.inf), scratch + (r << 2), at_m)
            k.store(k.f32(0.0), scratch + (r << 2), at_l)
        low, high = _visible(k, s, a, seq, position, queries)
        if s.spans:
            high = _seen_to(k, a, first_row + queries - 1)  # spans end in order
        with k.range(low & -SPLIT, high, SPLIT) as start:
            count = k.minimum(high - start, SPLIT)
            oldest = k.maximum(low - start, 0)
            first, last = oldest & -KEYS, (count + KEYS - 1) & -KEYS

            def score(r: Val, n: int) -> None:
                q, p = scratch + at_q + r * q_bytes, scratch + at_p + r * (4 * SPLIT)
                scores(k, level, s, q, scratch + at_k, p, n, first, last)

            def score_unpacked() -> None:
                _unpack_keys(k, level, keys, values, start, first, count, scratch + at_k)
                by_rows(k, rows, (widest, 1), score)

            def score_in_cache() -> None:
                direct.scores(k, level, s, scratch + at_q, keys, scratch + at_p, rows, start, (first, count), high)

            def score_integers() -> None:
                q, tile, p = (scratch + at for at in (at_q, at_k, at_p))
                integer.scores(k, level, s, q, (keys, values), tile, p, rows, start, (first, count))

            _one_way(k, s, rows, score_integers, score_in_cache, score_unpacked)
            if s.folds:
                _copy_scales(k, keys, start, (oldest & -16, count), scratch + at_scales)
            with k.range(0, rows) as r:
                own = position + r.udiv(s.group)
                seen = _seen_to(k, a, first_row + r.udiv(s.group)) if s.spans else own + 1
                end = (seen if s.causal else k.minimum(high, own + s.reach + 1) if s.reach else high) - start
                below = k.maximum(_oldest(k, s, own if s.spans else end + start - 1) - start, 0) if s.window else k.i64(0)
                if s.reach:
                    below = k.maximum(own - s.reach - start, 0)
                p = scratch + at_p + r * (4 * SPLIT)
                m, total = softmax(k, s, p, scratch + at_scales, first, last, below, end)
                merge(k, *(scratch + (r << 2) + x for x in (at_m, at_l, at_a, at_b)), m, total)

            def weigh(r: Val, n: int) -> None:
                p, o = scratch + at_p + r * (4 * SPLIT), scratch + at_o + r * o_bytes
                factors = (scratch + (r << 2) + x for x in (at_a, at_b))
                weigh_values(k, level, s, p, scratch + at_v, o, *factors, n, first, last)

            def weigh_unpacked() -> None:
                _unpack_values(k, level, values, start, oldest, count, scratch + at_v)
                if s.folds:
                    with k.range(oldest & -KEYS, count, KEYS) as step:
                        seen = (k.maximum(step, oldest & -16), k.minimum(step + KEYS, count))
                        scale_weights(k, s, scratch + at_p, values, rows, start, *seen)
                by_rows(k, rows, (widest, 1), weigh)

            def weigh_in_cache() -> None:
                sums = scratch + at_s
                direct.weigh_values(k, level, s, scratch + at_p, values, sums, rows, start, (oldest, count), high)
                direct.add_values(k, s, sums, *(scratch + x for x in (at_o, at_a, at_b)), rows)

            def weigh_integers() -> None:
                p, tile, weights, sums = (scratch + at for at in (at_p, at_k, at_v, at_s))
                span = (oldest, count)
                integer.weigh_values(k, level, s, p, (keys, values), tile, weights, sums, rows, start, span, high)
                direct.add_values(k, s, sums, *(scratch + x for x in (at_o, at_a, at_b)), rows)

            _one_way(k, s, rows, weigh_integers, weigh_in_cache, weigh_unpacked)
        with k.range(0, rows) as r:
            total, factor = k.load(scratch + (r << 2), F32, at_l), k.f32(1.0)
            if s.sinks:
                m = k.load(scratch + (r << 2), F32, at_m)
                sink = k.load(a.sinks + (head * s.group + (r - r.udiv(s.group) * s.group) << 2), F32)
                top = k.maximum(m, sink)
                factor = exp(k, m - top)
                total = total * factor + exp(k, sink - top)
            inverse = k.select(total > 0.0, factor / total, 0.0)
            to, o = place(r, a.y, s.value_dim), scratch + at_o + r * o_bytes
            if s.integers:
                integer.store_result(k, s, o, to, inverse)
            else:
                _scaled_copy(k, s.value_dim, o, to, inverse)

    paged = ("block_table", "live_blocks", "sinks", "see_to") if s.causal else ("query_start",)
    fields = ("q", "y", "k_cache", "v_cache", "items", "live_items", *paged)
    return KernelDef(f"attention/{s}", fields, body, scratch_bytes)


def _query_blocks(e: Lowering, queries: int, query_start: Value, kv_len: Value | None) -> tuple[int, int]:
    """(address, header word of their count) of the planned blocks of so many queries, planned once a step.

    Without `kv_len` every sequence's keys are its own queries' rows.
    """

    def make() -> tuple[int, int]:
        p = e.plan
        items, word = np.zeros(4 * (p.sizes["T"] + p.sizes["S"]), np.int64), p.header.new()
        known = {} if kv_len is None else {"kv_len": kv_len}
        fields = {"live_seqs": p.live("S"), "query_start": query_start, "items": items, "count": p.header.address(word)}
        e.shared_stage(None, plan(queries, kv_len is not None), Header.ONE, **fields, **known)
        return int(items.ctypes.data), word

    return e.once(("query blocks", queries, query_start.name), make)


def build_attention(e: Lowering, node: Node) -> None:
    s, (y,) = node.spec, node.outputs
    q, query_start, kv_len, block_table, cache, *rest = node.inputs
    arrays = e.caches[cache.layer]
    group, block_size = s.n_heads // s.n_kv, arrays.block_size
    shape = Shape(
        *(group, s.n_kv, s.head_dim, block_size, s.scale, s.window, s.cap, s.sinks, arrays.kind, s.chunked),
        latent=s.latent,
        spans=s.spans,
    )
    # float32 arithmetic is more exact than 16 bits of a query.
    shape = shape if e.plan.exact else integer.in_integers(shape, e.plan.level)
    items, count = _query_blocks(e, shape.queries, query_start, kv_len)
    table = {"block_table": block_table, "live_blocks": e.plan.live("B"), "sinks": rest[0] if s.sinks else None}
    table["see_to"] = rest[-1] if s.spans else None
    kernel = attention(shape, e.plan.level)
    e.stage(kernel, count, times=s.n_kv, q=q, y=y, **e.cache(cache), **table, items=items, live_items=Live(count))


def build_encode(e: Lowering, node: Node) -> None:
    s, (q, k, v, query_start), (y,) = node.spec, node.inputs, node.outputs
    shape = Shape(s.n_heads // s.key_heads, s.key_heads, s.head_dim, 16, s.scale, causal=False, reach=s.reach)
    items, count = _query_blocks(e, shape.queries, query_start, None)
    rows = {"k_cache": k, "v_cache": v, "query_start": query_start}
    e.stage(attention(shape, e.plan.level), count, times=s.key_heads, q=q, y=y, **rows, items=items, live_items=Live(count))


def _accepts(s: AttentionSpec) -> str | None:
    if s.latent and (s.head_dim % 16 or s.latent % 16):
        return f"needs whole vectors of 16 where scores read the values, got keys of {s.head_dim} and {s.latent} values"
    return None


IMPLEMENTATIONS = (
    Implementation(ATTENTION, "paged flash", build_attention, _accepts),
    Implementation(ENCODE, "flash", build_encode),
)
