"""Drawing from large vocabularies, where a small top_k looks at few tokens only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.sampling.sample import GROUPS, MOST
from quarrel.ops.sample import SAMPLE, SampleSpec, draw_token, kept

SIZES = (4 * GROUPS - 1, 4 * GROUPS, 4 * GROUPS + 1037, 49152, 151_669)
"""Below and from where groups are looked at; of the third and the last, many tokens are in no group."""


@pytest.fixture(name="backend", scope="module")
def _backend() -> Iterator[CpuBackend]:
    backend = CpuBackend(threads=1)
    yield backend
    backend.close()


def drawn(backend: CpuBackend, logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, uniform: Any) -> Any:
    rows = len(logits)
    columns = [np.broadcast_to(np.asarray(x, np.float32), rows).copy() for x in (temperature, top_p, min_p, uniform)]
    ks = np.broadcast_to(np.asarray(top_k, np.int32), rows).copy()
    spec = SampleSpec(logits.shape[1])
    (tokens,) = backend.run_op(SAMPLE, spec, (logits, columns[0], ks, *columns[1:]))
    rest = zip(logits, columns[0], ks, *columns[1:], strict=True)
    wanted = [draw_token(x, float(t), int(k), float(p), float(m), float(u)) for x, t, k, p, m, u in rest]
    return tokens, np.array(wanted)


@pytest.mark.parametrize("n", SIZES)
def test_draws_are_the_reference_s(backend: CpuBackend, n: int) -> None:
    rng = np.random.default_rng(n)
    rows = 24
    logits = (rng.standard_normal((rows, n)) * rng.choice([0.5, 3.0, 12.0], (rows, 1))).astype(np.float32)
    for top_k in (0, 1, 2, 40, MOST, MOST + 1, n - 1, n, n + 5):
        temperature = rng.choice([0.01, 0.8, 1.0, 100.0], rows)
        settings = rng.choice([1.0, 0.95, 0.3], rows), rng.choice([0.0, 0.05, 1.0], rows), rng.random(rows)
        tokens, wanted = drawn(backend, logits, temperature, top_k, *settings)
        assert np.array_equal(tokens, wanted), top_k


@pytest.mark.parametrize("n", SIZES[:4])
def test_the_largest_may_be_anywhere(backend: CpuBackend, n: int) -> None:
    """In one group, behind the last whole one, at both ends; every kept token is drawn by some number."""
    rng = np.random.default_rng(1)
    places = [
        np.arange(0, 40),
        np.arange(n - 40, n),
        np.arange(0, 40) * 16 % n,
        np.sort(rng.choice(n, 40, replace=False)),
    ]
    for place in places:
        logits = rng.standard_normal((160, n)).astype(np.float32) * 0.1
        logits[:, place] += 9
        tokens, wanted = drawn(backend, logits, 1.0, 40, 1.0, 0.0, np.linspace(0, 0.9999, 160))
        assert np.array_equal(tokens, wanted)
        assert set(tokens) == set(place)


@pytest.mark.parametrize("n", SIZES[1:4])
def test_ties_and_what_is_not_finite(backend: CpuBackend, n: int) -> None:
    rng = np.random.default_rng(2)
    rows = 64
    uniform = np.linspace(0, 0.9999, rows)
    tied = np.zeros((rows, n), np.float32)
    tied[:, rng.choice(n, 100, replace=False)] = 1  # of a hundred, forty cannot be told apart: all are kept
    few = np.full((rows, n), -np.inf, np.float32)
    few[:, rng.choice(n, 7, replace=False)] = rng.standard_normal(7)
    infinite = rng.standard_normal((1, n)).astype(np.float32).repeat(rows, 0)
    infinite[:, ::3], infinite[:, 1::3] = np.inf, -np.inf
    level = np.float32(1) + np.arange(n, dtype=np.float32)[None].repeat(rows, 0) * np.float32(2**-23)
    for name, logits in (("tied", tied), ("few", few), ("infinite", infinite), ("level", level)):
        for temperature in (0.001, 1.0, 1e18):
            tokens, wanted = drawn(backend, logits, temperature, 40, 1.0, 0.0, uniform)
            x = np.where(np.isfinite(logits[0]), logits[0], -np.inf).astype(np.float64)
            mask = kept(np.exp((x - x.max()) / temperature), 40, 1.0, 0.0) & (x > -np.inf)
            assert mask[tokens].all(), (name, temperature)
            # Among thousands of equals a sum in another order may end one token earlier or later.
            order = np.cumsum(mask) - 1
            assert np.abs(order[tokens] - order[wanted]).max() <= (1 if mask.sum() > 1000 else 0), (name, temperature)


def test_a_row_that_diverged_gives_none(backend: CpuBackend) -> None:
    logits = np.zeros((3, 8 * GROUPS), np.float32)
    logits[0, -1], logits[1] = np.nan, np.inf
    tokens, wanted = drawn(backend, logits, 1.0, 40, 0.95, 0.05, 0.5)
    assert list(tokens[:2]) == list(wanted[:2]) == [-1, -1]
    assert tokens[2] == wanted[2]
