"""Attention over the paged cache beyond the contract's cases: several splits, mixed batches, what must not leak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Array, Case, KVArrays
from quarrel.triton_backend.attention import LEAST_SPLIT, tiles
from quarrel.triton_backend.backend import TritonBackend
from tests.triton_backend.cases import COMPUTES, error_on

SPEC = AttentionSpec(4, 2, 64, 0.125)


def batch(spec: AttentionSpec, lengths: list[tuple[int, int]], seed: int = 0) -> tuple[Any, ...]:
    """Inputs for sequences of (new tokens, keys in all), block size 32."""
    rng = np.random.default_rng(seed)
    new, kv_len = (np.array(x, np.int32) for x in zip(*lengths, strict=True))
    width = -(-int(kv_len.max()) // 32)
    table = rng.permutation(len(new) * width).reshape(-1, width).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    shape = (table.size, 32, spec.n_kv, spec.head_dim)
    cache = KVArrays(rng.standard_normal(shape, dtype=np.float32), rng.standard_normal(shape, dtype=np.float32))
    q = rng.standard_normal((int(new.sum()), spec.width), dtype=np.float32) * 2
    return q, starts, kv_len, table, cache


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize(
    "spec",
    [SPEC, replace(SPEC, window=300), replace(SPEC, cap=10.0), AttentionSpec(6, 2, 80, 0.11, window=700)],
    ids=["plain", "window", "cap", "groups of 3"],
)
def test_decode_over_several_splits(backend: TritonBackend, spec: AttentionSpec, compute: Any) -> None:
    inputs = batch(spec, [(1, 1101), (1, LEAST_SPLIT), (1, LEAST_SPLIT + 1), (1, 3)])
    assert error_on(backend, ATTENTION, spec, inputs, compute) <= ATTENTION.tolerance[compute]


def test_sinks_over_several_splits(backend: TritonBackend) -> None:
    spec = replace(SPEC, sinks=True, window=128)
    _, *_, sinks = ATTENTION.make(Case(spec, {"S": 1, "Q": 1, "KV": 0, "block_size": 32}), np.random.default_rng(0))  # type: ignore[misc]
    inputs = (*batch(spec, [(1, 612), (1, 5), (9, 40)]), sinks)
    assert error_on(backend, ATTENTION, spec, inputs, "float32") <= ATTENTION.tolerance["float32"]


def test_decode_and_prefill_in_one_batch(backend: TritonBackend) -> None:
    inputs = batch(SPEC, [(1, 600), (40, 100), (1, 1), (2, 2), (17, 33), (1, 64)])
    assert error_on(backend, ATTENTION, SPEC, inputs, "float32") <= ATTENTION.tolerance["float32"]


@pytest.mark.parametrize("window", [31, 32, 33, 64])
def test_window_edges(backend: TritonBackend, window: int) -> None:
    spec = replace(SPEC, window=window)
    inputs = batch(spec, [(35, 99), (1, 97)])
    assert error_on(backend, ATTENTION, spec, inputs, "float32") <= ATTENTION.tolerance["float32"]


@pytest.mark.parametrize("compute", COMPUTES)
def test_a_sequence_does_not_depend_on_its_batch(backend: TritonBackend, compute: Any) -> None:
    q, starts, kv_len, table, cache = batch(SPEC, [(1, 600), (40, 100), (1, 7), (3, 70)])
    whole = run(backend, (q, starts, kv_len, table, cache), compute)
    for s in range(4):
        a, b = int(starts[s]), int(starts[s + 1])
        one = (q[a:b].copy(), np.array([0, b - a], np.int32), kv_len[s : s + 1], table[s : s + 1].copy(), cache)
        assert np.array_equal(run(backend, one, compute), whole[a:b]), s


def test_a_chunk_of_a_prompt_gives_the_same_rows(backend: TritonBackend) -> None:
    q, starts, kv_len, table, cache = batch(SPEC, [(75, 75)])
    whole = run(backend, (q, starts, kv_len, table, cache), "float16")
    for a, b in ((0, 20), (20, 75)):
        part = (q[a:b].copy(), np.array([0, b - a], np.int32), np.array([b], np.int32), table, cache)
        assert np.array_equal(run(backend, part, "float16"), whole[a:b])


def test_nan_in_blocks_of_others_does_not_leak(backend: TritonBackend) -> None:
    q, starts, kv_len, table, cache = batch(SPEC, [(1, 40), (5, 20)])
    want = run(backend, (q, starts, kv_len, table, cache), "float32")
    used = np.concatenate([table[0, :2], table[1, :1]])
    k, v = (np.where(np.isin(np.arange(len(a)), used)[:, None, None, None], a, np.nan) for a in (cache.k, cache.v))
    # Within a used block, what lies past the sequence's end is not its own either.
    for row, length in ((0, 40), (1, 20)):
        block, offset = table[row, (length - 1) // 32], length % 32
        k[block, offset:], v[block, offset:] = np.nan, np.nan
    poisoned = KVArrays(k.astype(np.float32), v.astype(np.float32))
    assert np.array_equal(run(backend, (q, starts, kv_len, table, poisoned), "float32"), want)


def test_a_sequence_without_new_tokens_is_passed_over(backend: TritonBackend) -> None:
    inputs = batch(SPEC, [(1, 40), (0, 20), (3, 20)])
    assert error_on(backend, ATTENTION, SPEC, inputs, "float32") <= ATTENTION.tolerance["float32"]


def test_keys_of_a_tile_follow_from_the_head_alone() -> None:
    """Decode and prefill walk the same tiles, and a split is whole tiles: what makes rows independent of their batch."""
    for compute in ("float32", "float16", "bfloat16"):
        for dim in (16, 64, 80, 96, 128, 256):
            decode, prefill = tiles(compute, dim, 8)  # type: ignore[arg-type]
            assert decode.keys == prefill.keys
            assert LEAST_SPLIT % decode.keys == 0


def run(backend: TritonBackend, inputs: tuple[Any, ...], compute: Any) -> Array:
    (out,) = backend.run_op(ATTENTION, SPEC, inputs, compute)
    assert isinstance(out, np.ndarray)
    return out
