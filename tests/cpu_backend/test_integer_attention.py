"""Attention to int8 codes in whole numbers: near float32, never beyond 32 bits, the same bits in any block of queries."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from quarrel.cpu_backend.attention.integer import in_integers
from quarrel.cpu_backend.attention.shape import Shape
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.runtime.features import LEVELS, Level, levels
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Array, Case, KVArrays, rel_error
from quarrel.ops.kv import KV_TYPES

SPECS = (
    AttentionSpec(8, 2, 128, 0.088),
    AttentionSpec(2, 2, 64, 0.125, window=70),
    AttentionSpec(2, 1, 80, 0.11, cap=20.0),
    AttentionSpec(7, 1, 96, 0.1, sinks=True),
    AttentionSpec(8, 1, 64, 0.125, window=100, chunked=True),
    AttentionSpec(3, 1, 16, 0.25, spans=True),
)
WITH_DOT = [level.name for level in levels() if level.dot == "vnni512"]


@pytest.fixture(name="chosen", scope="module", params=WITH_DOT)
def _chosen(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    backend = CpuBackend(request.param, threads=2)
    yield backend
    backend.close()


def drawn(spec: AttentionSpec, queries: int, block: int) -> tuple[Array | KVArrays, ...]:
    dims = {"S": 2, "Q": queries, "KV": 700, "block_size": block, "kv": KV_TYPES.index("int8")}
    made: tuple[Array | KVArrays, ...] = ATTENTION.make(Case(spec, dims), np.random.default_rng(11))
    return made


def worst_head(got: Array, want: Array, spec: AttentionSpec) -> float:
    """The largest error of a row's head, relative to that head."""
    one, other = (np.asarray(x).reshape(-1, spec.head_dim) for x in (got, want))
    return max(rel_error(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("queries", "block"), [(1, 32), (33, 16)])
def test_sixteen_bits_are_near_float32_which_stays_exact(
    chosen: CpuBackend, spec: AttentionSpec, queries: int, block: int
) -> None:
    inputs = drawn(spec, queries, block)
    rounded, exact = (chosen.run_op(ATTENTION, spec, inputs, compute)[0] for compute in ("auto", "float32"))  # type: ignore[arg-type]
    assert 2e-6 < rel_error(rounded, exact) < 1e-4
    assert worst_head(rounded, exact, spec) < 2e-4


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_row_has_the_same_bits_beside_any_others(chosen: CpuBackend, spec: AttentionSpec) -> None:
    q, _, lengths, table, cache, *rest = drawn(spec, 33, 32)
    others = rest[:-1] if spec.spans else rest
    end = int(np.asarray(lengths)[0])
    together = chosen.run_op(ATTENTION, spec, drawn(spec, 33, 32))[0][:33]
    for first, last in ((32, 33), (30, 33), (0, 1), (20, 33), (3, 10)):
        span = [np.asarray(rest[-1])[first:last]] if spec.spans else []
        one = (np.array([0, last - first], np.int32), np.array([end - 33 + last], np.int32), np.asarray(table)[:1], cache)
        (y,) = chosen.run_op(ATTENTION, spec, (np.asarray(q)[first:last], *one, *others, *span))[:1]
        assert np.array_equal(y, together[first:last]), (first, last)


@pytest.mark.parametrize("dim", [48, 256, 1024])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_fit(chosen: CpuBackend, dim: int, sign: int) -> None:
    """Every product has the largest magnitude, and all of a sum one sign."""
    keys, spec = 300, AttentionSpec(5, 1, dim, 1.0 / dim)
    k, v = np.full((19, 16, 1, dim), sign, np.float32), np.full((19, 16, 1, dim), -2.0, np.float32)
    k[3], v[:, :, :, ::3] = 0.25, 2.0
    q = np.full((2, 5 * dim), 1.0, np.float32)
    table = np.arange(19, dtype=np.int32)[None]
    inputs = (q, np.array([0, 2], np.int32), np.array([keys], np.int32), table, KVArrays(k, v, "int8"))
    (y,) = chosen.run_op(ATTENTION, spec, inputs)[:1]
    assert np.abs(y.reshape(2, 5, dim) - v[0, 0, 0]).max() < 1e-4


@pytest.mark.parametrize("size", [0.0, 1e-34, 1e-3, 300.0])
def test_queries_of_any_size(chosen: CpuBackend, size: float) -> None:
    """None at all weighs values alike; large ones see one key, and weights of the others' steps are zero."""
    spec = AttentionSpec(4, 1, 64, 0.125)
    q, *rest = drawn(spec, 2, 32)
    scaled = (np.asarray(q) * np.float32(size), *rest)
    rounded, exact = (chosen.run_op(ATTENTION, spec, scaled, compute)[0] for compute in ("auto", "float32"))  # type: ignore[arg-type]
    assert rel_error(rounded, exact) < (2e-2 if size > 1 else 1e-4)


@pytest.mark.parametrize("level", LEVELS.values(), ids=lambda level: level.name)
def test_which_layers_are_computed_so(level: Level) -> None:
    dot = level.dot == "vnni512"
    assert in_integers(Shape(4, 2, 80, 16, 0.1, kind="int8"), level).integers == dot
    for s in (
        Shape(4, 2, 80, 16, 0.1, kind="fp8"),
        Shape(4, 2, 72, 16, 0.1, kind="int8"),
        Shape(4, 2, 64, 16, 0.1, kind="int8", latent=64),
        Shape(4, 2, 64, 16, 0.1, kind="int8", causal=False),
    ):
        assert in_integers(s, level) == s
