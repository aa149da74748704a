"""A query has the same bits in any block of queries: few read the cache as it is, many an unpacked copy."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.cpu_backend.attention import direct
from quarrel.cpu_backend.attention.cache import Cache, kind_of, new_cache, to_host
from quarrel.cpu_backend.attention.shape import Shape
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.runtime.features import levels
from quarrel.ops.attention import ATTENTION, KV_APPEND, AttentionSpec, KVAppendSpec
from quarrel.ops.contract import Array, Case, KVArrays
from quarrel.ops.kv import KV_TYPES, KVType, stored
from quarrel.ops.program import KVLayer
from quarrel.ops.step import ComputeChoice

SPECS = (
    ("auto", AttentionSpec(8, 2, 64, 0.125, cap=20.0)),
    ("bfloat16", AttentionSpec(2, 2, 80, 0.11, window=70)),
    ("int8", AttentionSpec(6, 1, 48, 0.14, sinks=True)),
    ("fp8", AttentionSpec(3, 1, 128, 0.088)),
    ("fp8_e5m2", AttentionSpec(8, 1, 32, 0.17, window=200)),
    ("int8", AttentionSpec(32, 8, 128, 0.088)),
    ("fp8", AttentionSpec(4, 4, 64, 0.125)),
)


@pytest.mark.parametrize(("type", "spec"), SPECS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_query_alone_has_the_bits_that_it_has_among_many(backend: CpuBackend, type: KVType, spec: AttentionSpec) -> None:
    many = 40
    dims = {"S": 1, "Q": many, "KV": 290, "block_size": 16, "kv": KV_TYPES.index(type)}
    q, _, *rest = ATTENTION.make(Case(spec, dims), np.random.default_rng(5))  # type: ignore[misc]
    (whole,) = backend.run_op(ATTENTION, spec, (q, np.array([0, many], np.int32), *rest))[:1]
    assert many * spec.n_heads // spec.n_kv > direct.MOST_ROWS
    for few in {1, max(1, direct.MOST_ROWS * spec.n_kv // spec.n_heads)}:
        (y,) = backend.run_op(ATTENTION, spec, (q[-few:], np.array([0, few], np.int32), *rest))[:1]
        assert np.array_equal(y, whole[-few:])


@pytest.mark.parametrize("type", ["int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("level", [level.name for level in levels() if level.name in ("avx2", levels()[0].name)])
@pytest.mark.parametrize("dim", [64, 72])
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else(type: KVType, level: str, dim: int) -> None:
    spec, many, broken = AttentionSpec(4, 1, dim, 0.12), 40, 300
    dims = {"S": 1, "Q": many, "KV": 290, "block_size": 16, "kv": KV_TYPES.index(type)}
    q, _, lengths, table, cache = ATTENTION.make(Case(spec, dims), np.random.default_rng(9))  # type: ignore[misc]
    backend = CpuBackend(level, threads=1)
    first = int(lengths[0]) - many  # the position of the first query
    for which in ("k", "v"):
        arrays = {name: getattr(cache, name).copy() for name in ("k", "v")}
        arrays[which][table[0, broken // 16], broken % 16, 0, 7] = np.inf
        held = KVArrays(arrays["k"], arrays["v"], type)
        for rows in (np.arange(many), np.array([many - 1]), np.array([broken - first - 1])):
            end = np.array([first + rows[-1] + 1], np.int32)
            (y,) = backend.run_op(ATTENTION, spec, (q[rows], np.array([0, len(rows)], np.int32), end, table, held))[:1]
            seen = first + rows >= broken
            assert np.isnan(y[seen]).all(), (which, rows)
            assert np.isfinite(y[~seen]).all(), (which, rows)
    backend.close()


def test_layers_of_few_heads_and_whole_vectors_are_read_directly() -> None:
    assert direct.takes(Shape(8, 1, 80, 16, 0.1, kind="fp8"))
    for s in (
        Shape(9, 1, 80, 16, 0.1, kind="fp8"),
        Shape(8, 1, 88, 16, 0.1, kind="float16"),
        Shape(8, 1, 80, 16, 0.1),
        Shape(8, 1, 80, 16, 0.1, kind="float16", causal=False),
        Shape(8, 1, 80, 16, 0.1, kind="float16", latent=64),
    ):
        assert not direct.takes(s)


CUT = (
    *((*case, "auto") for case in SPECS),
    ("float16", AttentionSpec(4, 1, 32, 0.1, latent=64), "auto"),
    ("fp8", AttentionSpec(2, 1, 72, 0.12, spans=True), "auto"),
    ("int8", AttentionSpec(4, 4, 64, 0.13, window=50, chunked=True), "auto"),
    ("auto", AttentionSpec(16, 1, 96, 0.1, sinks=True), "float32"),
    ("auto", AttentionSpec(2, 2, 20, 0.1), "float32"),
)


@pytest.mark.parametrize(("type", "spec", "compute"), CUT, ids=lambda x: x if isinstance(x, str) else "")
def test_bits_do_not_depend_on_how_many_tokens_a_block_has(
    backend: CpuBackend, type: KVType, spec: AttentionSpec, compute: ComputeChoice
) -> None:
    dims = {"S": 2, "Q": 20, "KV": 290, "block_size": 16, "kv": KV_TYPES.index(type)}
    q, starts, lengths, table, cache, *rest = ATTENTION.make(Case(spec, dims), np.random.default_rng(6))
    cut = _cut_again(cache, table, 48)
    for rows, first in ((np.arange(len(q)), starts), (starts[1:] - 1, np.arange(3, dtype=np.int32))):
        others = [x[rows] for x in rest] if spec.spans else rest
        y, other = (
            backend.run_op(ATTENTION, spec, (q[rows], first, lengths, *where, *others), compute)[0]
            for where in ((table, cache), cut)
        )
        assert np.array_equal(y, other)
        assert np.isfinite(y).all()


def _cut_again(cache: KVArrays, table: Array, size: int) -> tuple[Array, KVArrays]:
    """The same sequences in blocks of so many tokens, with NaN where they end."""
    arrays = []
    for x in (cache.k, cache.v):
        tokens = x[table].reshape(len(table), -1, *x.shape[2:])
        blocks = -(-tokens.shape[1] // size)
        whole = np.full((len(table), blocks * size, *x.shape[2:]), np.nan, np.float32)
        whole[:, : tokens.shape[1]] = tokens
        arrays.append(whole.reshape(-1, size, *x.shape[2:])[::-1])
    return np.arange(len(arrays[0]), dtype=np.int32)[::-1].reshape(len(table), -1), KVArrays(*arrays, cache.type)


@pytest.mark.parametrize(("type", "compute"), [("auto", "float32"), *((type, "auto") for type in KV_TYPES)])
def test_keys_and_values_that_were_appended_are_those_that_were_kept_at_once(
    backend: CpuBackend, type: KVType, compute: ComputeChoice
) -> None:
    rng = np.random.default_rng(7)
    before = KVArrays(*(np.zeros((3, 32, 2, dim), np.float32) for dim in (72, 40)), type)
    k, v = (rng.standard_normal((9, 2 * dim)).astype(np.float32) for dim in (72, 40))
    slots = rng.permutation(96)[:9].astype(np.int32)
    (after,) = backend.run_op(KV_APPEND, KVAppendSpec(2, 72, 40), (k, v, slots, before), compute)
    kind = kind_of(type, compute == "float32")
    for found, rows in ((after.k, k), (after.v, v)):
        heads = rows.reshape(9, 2, -1)
        flat = found.reshape(96, 2, -1)
        assert np.array_equal(flat[slots], stored(heads, "auto" if kind == "float32" else kind))
        assert not np.delete(flat, slots, 0).any()


@pytest.mark.parametrize("type", KV_TYPES)
def test_a_head_s_block_is_one_stretch_of_memory(type: KVType) -> None:
    kind = kind_of(type, False)
    values = KVArrays(*np.random.default_rng(8).standard_normal((2, 4, 16, 3, 80)).astype(np.float32), type)
    cache = new_cache(KVLayer(3, 80), 4, 16, kind, values)
    for array, within in ((cache.k, (3, 1)), (cache.v, (1, 3))):
        assert array.transpose(0, 2, *within).flags.c_contiguous
        assert array.shape[:3] == (4, 16, 3)
    assert all(np.array_equal(stored(x, kind), y) for x, y in zip((values.k, values.v), _both(to_host(cache, kind))))


def _both(cache: KVArrays) -> tuple[Array, Array]:
    return cache.k, cache.v


@pytest.mark.parametrize("type", KV_TYPES)
def test_a_cache_begins_where_a_line_does(type: KVType) -> None:
    cache: Cache = new_cache(KVLayer(3, 80), 1000, 16, kind_of(type, False))
    assert cache.k.ctypes.data % 64 == cache.v.ctypes.data % 64 == 0
    assert not cache.k.any()
