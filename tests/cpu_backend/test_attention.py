"""A query has the same bits in any block of queries: few read the cache as it is, many an unpacked copy."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.cpu_backend.attention import direct
from quarrel.cpu_backend.attention.cache import Cache, kind_of, new_cache
from quarrel.cpu_backend.attention.shape import Shape
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Case
from quarrel.ops.kv import KV_TYPES, KVType
from quarrel.ops.program import KVLayer

SPECS = (
    ("auto", AttentionSpec(8, 2, 64, 0.125, cap=20.0)),
    ("bfloat16", AttentionSpec(2, 2, 80, 0.11, window=70)),
    ("int8", AttentionSpec(6, 1, 48, 0.14, sinks=True)),
    ("fp8", AttentionSpec(3, 1, 128, 0.088)),
    ("fp8_e5m2", AttentionSpec(8, 1, 32, 0.17, window=200)),
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


def test_layers_of_few_heads_and_whole_vectors_are_read_directly() -> None:
    assert direct.takes(Shape(8, 1, 80, 16, 0.1, kind="fp8"))
    for s in (
        Shape(9, 1, 80, 16, 0.1, kind="fp8"),
        Shape(8, 1, 88, 16, 0.1, kind="float16"),
        Shape(8, 1, 80, 24, 0.1, kind="float16"),
        Shape(8, 1, 80, 16, 0.1),
        Shape(8, 1, 80, 16, 0.1, kind="float16", causal=False),
        Shape(8, 1, 80, 16, 0.1, kind="float16", latent=64),
    ):
        assert not direct.takes(s)


@pytest.mark.parametrize("type", KV_TYPES)
def test_a_cache_begins_where_a_line_does(type: KVType) -> None:
    cache: Cache = new_cache(KVLayer(3, 80), 1000, 16, kind_of(type, False))
    assert cache.k.ctypes.data % 64 == cache.v.ctypes.data % 64 == 0
    assert not cache.k.any()
