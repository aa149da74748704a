"""Drawing tokens at the edges: vocabularies that fill no block, ties, infinities, NaN, extreme controls."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from quarrel.ops.contract import Array
from quarrel.ops.sample import SAMPLE, SampleSpec, sample_reference
from quarrel.triton_backend.backend import TritonBackend
from tests.triton_backend.cases import EVERYTHING

Controls = tuple[float, int, float, float, float]


def drawn(backend: TritonBackend, logits: Array, controls: list[Controls]) -> tuple[Array, Array]:
    """Tokens here and by the reference; the controls are temperature, top_k, top_p, min_p and the uniform number."""
    t, k, p, m, u = zip(*controls, strict=True)
    rows = (np.float32(t), np.int32(k), np.float32(p), np.float32(m), np.float32(u))
    inputs = (np.ascontiguousarray(logits, np.float32), *(np.ascontiguousarray(r) for r in rows))
    spec = SampleSpec(logits.shape[1])
    (got,) = backend.run_op(SAMPLE, spec, inputs)
    (want,) = sample_reference(spec, *inputs)  # type: ignore[arg-type]
    return got, want  # type: ignore[return-value]


@pytest.mark.parametrize("n", [1, 100, 4096, 8193, 10000])
def test_a_token_is_always_inside_the_vocabulary(backend: TritonBackend, n: int) -> None:
    rng = np.random.default_rng(n)
    plain = rng.standard_normal(n, dtype=np.float32)
    tail = np.where(np.arange(n) < n - n // 3, -5.0, 0.0)
    one_infinite, some_nan = plain.copy(), plain.copy()
    one_infinite[n // 2] = np.inf
    some_nan[:: max(1, n // 7)] = np.nan
    rows = [plain, tail, np.zeros(n), np.full(n, -np.inf), np.full(n, np.nan), one_infinite, some_nan]
    for temperature in (0.0, 0.8):
        controls = [(temperature, 0, 1.0, 0.0, 0.999)] * len(rows)
        got, want = drawn(backend, np.stack(rows), controls)
        assert got.tolist() == want.tolist()
        assert got[3] == got[4] == got[6] == -1
        assert got.max() < n


def test_all_controls_together(backend: TritonBackend) -> None:
    grid = list(product((0.7, 1.5), (0, 1, 7, 299, 300, 1000), (1.0, 0.9, 0.01, 0.0), (0.0, 0.1), (0.0, 0.37, 0.9999)))
    grid = grid if EVERYTHING else grid[::7]
    logits = np.random.default_rng(0).standard_normal((len(grid), 300), dtype=np.float32) * 3
    got, want = drawn(backend, logits, grid)
    assert got.tolist() == want.tolist()


def test_ties_at_a_threshold_are_all_kept(backend: TritonBackend) -> None:
    logits = np.array([1, 3, 2, 2, 2, 0, 2, -1], np.float32)
    at_k = [(1.0, 2, 1.0, 0.0, u) for u in np.linspace(0, 0.999, 6)]
    at_p = [(1.0, 0, 0.5, 0.0, u) for u in np.linspace(0, 0.999, 6)]
    got, want = drawn(backend, np.tile(logits, (12, 1)), at_k + at_p)
    assert got.tolist() == want.tolist()
    assert {1, 2, 3, 4, 6} >= set(got[:6].tolist()) > {1}


@pytest.mark.parametrize("temperature", [1e-8, 1e-3, 100.0])
def test_extreme_temperatures(backend: TritonBackend, temperature: float) -> None:
    logits = np.random.default_rng(3).standard_normal((4, 777), dtype=np.float32) * 30
    got, want = drawn(backend, logits, [(temperature, 0, 0.95, 0.0, u) for u in (0.0, 0.3, 0.6, 0.99)])
    assert got.tolist() == want.tolist()


def test_negative_zero_is_zero_and_signs_are_ordered(backend: TritonBackend) -> None:
    logits = np.array([[-0.0, 0.0, -1.0, 1e-3, -1e-3, -3.0]], np.float32)
    for k in (1, 2, 3, 5):
        got, want = drawn(backend, np.tile(logits, (4, 1)), [(1.0, k, 1.0, 0.0, u) for u in (0.0, 0.4, 0.7, 0.99)])
        assert got.tolist() == want.tolist(), k
