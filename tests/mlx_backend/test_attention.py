"""Attention over the paged cache beyond the contract's cases: head sizes, splits, mixed batches, what must not leak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quarrel.mlx_backend.attention.paged import SPLIT
from quarrel.mlx_backend.backend import MlxBackend
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Array, Case
from quarrel.ops.encode import ENCODE, EncodeSpec
from tests.mlx_backend.cases import error_on, running
from tests.mlx_backend.trials import attention_inputs

SPEC = AttentionSpec(8, 2, 64, 0.125)


def batch(spec: AttentionSpec, lengths: list[tuple[int, int]], seed: int = 0) -> tuple[Any, ...]:
    """Inputs for sequences of (new tokens, keys in all), block size 32."""
    return attention_inputs(spec, lengths, np.random.default_rng(seed))


def run(backend: MlxBackend, inputs: tuple[Any, ...], compute: Any = "float32") -> Array:
    (out,) = backend.run_op(ATTENTION, SPEC, inputs, compute)
    assert isinstance(out, np.ndarray)
    return out


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(2, 2, 80, 0.11, window=SPLIT + 3),
        AttentionSpec(7, 1, 96, 0.1, cap=10.0),
        AttentionSpec(8, 1, 128, 0.088, sinks=True),
        AttentionSpec(8, 2, 256, 0.0625),
        AttentionSpec(2, 1, 40, 0.16),
    ],
    ids=["80", "96, groups of 7, cap", "128, groups of 8, sinks", "256", "40"],
)
def test_every_head_size_alone_and_in_tiles(spec: AttentionSpec) -> None:
    """Sequences of one new token over several splits, and of several, in one batch."""
    inputs = batch(spec, [(1, SPLIT + 77), (11, 45), (1, 3)])
    if spec.sinks:
        *_, sinks = ATTENTION.make(Case(spec, {"S": 1, "Q": 1, "KV": 0, "block_size": 32}), np.random.default_rng(0))  # type: ignore[misc]
        inputs = (*inputs, sinks)
    with running() as backend:
        assert error_on(backend, ATTENTION, spec, inputs, "float16") <= ATTENTION.tolerance["float16"]


def test_cache_lengths_at_the_edges_of_blocks_and_splits() -> None:
    lengths = [1, 31, 32, 33, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT]
    with running() as backend:
        single = batch(SPEC, [(1, n) for n in lengths])
        assert error_on(backend, ATTENTION, SPEC, single, "float32") <= ATTENTION.tolerance["float32"]
        several = batch(SPEC, [(2, 2), (5, 31), (4, 32), (3, 33), (32, 32), (33, 65)])
        assert error_on(backend, ATTENTION, SPEC, several, "float32") <= ATTENTION.tolerance["float32"]


def test_edges_of_a_window() -> None:
    with running() as backend:
        for window in (1, 32, 33):
            spec = replace(SPEC, window=window)
            inputs = batch(spec, [(35, 99), (1, 97)])
            assert error_on(backend, ATTENTION, spec, inputs, "float32") <= ATTENTION.tolerance["float32"], window


@pytest.mark.parametrize("compute", ["float32", "float16"])
def test_a_sequence_does_not_depend_on_its_batch(compute: str) -> None:
    q, starts, kv_len, table, cache = batch(SPEC, [(1, SPLIT + 60), (40, 100), (1, 7), (3, 70)])
    with running() as backend:
        whole = run(backend, (q, starts, kv_len, table, cache), compute)
        for s in range(4):
            a, b = int(starts[s]), int(starts[s + 1])
            one = (q[a:b].copy(), np.array([0, b - a], np.int32), kv_len[s : s + 1], table[s : s + 1].copy(), cache)
            assert np.array_equal(run(backend, one, compute), whole[a:b]), s


def test_a_piece_of_a_prompt_gives_the_same_rows() -> None:
    q, starts, kv_len, table, cache = batch(SPEC, [(75, 75)])
    with running() as backend:
        whole = run(backend, (q, starts, kv_len, table, cache), "float16")
        for a, b in ((0, 20), (20, 75)):
            part = (q[a:b].copy(), np.array([0, b - a], np.int32), np.array([b], np.int32), table, cache)
            assert np.array_equal(run(backend, part, "float16"), whole[a:b])


def test_nan_in_a_query_stays_in_its_row() -> None:
    q, *rest = batch(SPEC, [(1, 40), (5, 20), (1, 9)])
    with running() as backend:
        want = run(backend, (q, *rest))
        for row, bad in ((0, np.nan), (3, np.nan), (3, np.inf)):
            poisoned = q.copy()
            poisoned[row, 5] = bad
            got = run(backend, (poisoned, *rest))
            others = np.arange(len(q)) != row
            assert np.array_equal(got[others], want[others]), (row, bad)


def test_a_row_that_sees_no_key_is_zero() -> None:
    """More new tokens than keys: the first of them stand before the first key."""
    q, starts, _, table, cache = batch(SPEC, [(5, 5)])
    with running() as backend:
        got = run(backend, (q, starts, np.array([2], np.int32), table, cache))
    assert (got[:3] == 0).all()
    assert np.isfinite(got).all()
    assert (got[3:] != 0).any()


def test_a_sequence_without_new_tokens_is_passed_over() -> None:
    inputs = batch(SPEC, [(1, 40), (0, 20), (3, 20)])
    with running() as backend:
        assert error_on(backend, ATTENTION, SPEC, inputs, "float32") <= ATTENTION.tolerance["float32"]


def test_scores_beyond_the_exponential_range() -> None:
    q, *rest = batch(SPEC, [(1, 50), (9, 40)])
    with running() as backend:
        # Scores are near 1000, where float32 is 6e-5 wide.
        assert error_on(backend, ATTENTION, SPEC, (q * 300, *rest), "float32") <= 5e-5


def test_encoders_heads_and_ragged_lengths() -> None:
    spec = EncodeSpec(2, 96, 40.0)
    inputs = ENCODE.make(Case(spec, {"S": 3, "Q": 35}), np.random.default_rng(1))  # type: ignore[misc]
    with running() as backend:
        assert error_on(backend, ENCODE, spec, inputs, "float32") <= 1e-5
