"""Every block format on every feature level that this machine can run: odd shapes, and the same bits whatever the batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.linear.activations import padded
from quarrel.cpu_backend.linear.tile import block_rows
from quarrel.cpu_backend.runtime import features
from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import rel_error
from quarrel.ops.embedding import EMBEDDING, EmbeddingSpec
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.kv import stored
from quarrel.ops.linear import LINEAR, LinearSpec

LEVELS = [level.name for level in features.levels()]
ROWS = (1, 2, 5, 7, 8, 9, 11, 17)


@pytest.fixture(name="backend", scope="module", params=LEVELS)
def _backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    backend = CpuBackend(request.param, threads=2)
    yield backend
    backend.close()


def shapes(type: GGMLType) -> list[tuple[int, int]]:
    """(n, k): whole superblocks, and a row that ends within one where the format allows it; of floats also chunks of more
    rows than a block of them has, with values in more than one stretch."""
    smallest = FORMATS[type].elements
    odd = {256: [], 64: [(35, 64 * 5)], 32: [(35, 32 * 11)], 1: [(35, 77), (35, 78), (500, 1030), (26, 4400)]}[smallest]
    return [(67, 768), *odd]


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda t: t.name)
def test_linear_is_right_and_does_not_depend_on_the_batch(backend: CpuBackend, type: GGMLType) -> None:
    rng = np.random.default_rng(1)
    for n, k in shapes(type):
        weight = draw.weight(rng, type, n, k)
        x = draw.activations(rng, max(ROWS), k)
        exact = x.astype(np.float64) @ weight.dense().astype(np.float64).T
        results = [backend.run_op(LINEAR, LinearSpec(type, n, k), (x[:rows], weight))[0] for rows in ROWS]
        assert rel_error(results[-1], exact) < LINEAR.tolerance["int8"]
        for y in results:
            assert np.array_equal(y, results[-1][: len(y)])
        singles = [backend.run_op(LINEAR, LinearSpec(type, n, k), (x[i : i + 1], weight))[0] for i in (4, 16)]
        assert np.array_equal(np.concatenate(singles), results[-1][[4, 16]])


@pytest.mark.parametrize(("k", "most"), [(2048, 512), (5632, 228), (11008, 108), (14336 + 32, 96), (1 << 17, 96)])
def test_long_rows_come_in_blocks_that_stay_in_a_cache(backend: CpuBackend, k: int, most: int) -> None:
    assert block_rows(padded(k)) == most
    rng, type, n = np.random.default_rng(3), GGMLType.Q8_0, 3
    weight, some = draw.weight(rng, type, n, k), draw.activations(rng, 9, k)
    wanted = backend.run_op(LINEAR, LinearSpec(type, n, k), (some, weight))[0]
    for rows in {most, most + 1, 2 * most + 13} if k < 1 << 16 else {most + 1}:
        (y,) = backend.run_op(LINEAR, LinearSpec(type, n, k), (some[np.arange(rows) % 9], weight))
        assert np.array_equal(y, wanted[np.arange(rows) % 9])


def test_pairs_of_bfloat16_round_x_and_nothing_else() -> None:
    level = features.levels()[0]
    if not level.bfloat16:
        pytest.skip(f"{level.name} has no products of pairs")
    rng, backend = np.random.default_rng(4), CpuBackend(level.name, threads=1)
    for k in (2, 30, 32, 78, 1030, 2048):
        weight, x = draw.weight(rng, GGMLType.BF16, 29, k), draw.activations(rng, 7, k)
        x[0, 0], x[1, 1], x[2, 0] = 1e-41, 3.4e38, -0.0  # a subnormal, what rounds to infinity
        x[3, 1] = np.nan
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = stored(x, "bfloat16").astype(np.float64)
            wanted = rounded @ weight.dense().astype(np.float64).T
        (y,) = backend.run_op(LINEAR, LinearSpec(GGMLType.BF16, 29, k), (x, weight))
        assert np.array_equal(np.isnan(y), np.isnan(wanted))
        fine = np.isfinite(wanted).all(1)
        assert list(fine) == [True, False, True, False, True, True, True]
        assert np.array_equal(y[1], wanted[1].astype(np.float32))
        assert rel_error(y[fine], wanted[fine]) < 2e-6
    backend.close()


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda t: t.name)
def test_rows_are_dequantised_exactly(backend: CpuBackend, type: GGMLType) -> None:
    rng = np.random.default_rng(2)
    for _, k in shapes(type):
        weight = draw.weight(rng, type, 9, k)
        ids = np.array([8, 0, 3], np.int32)
        (y,) = backend.run_op(EMBEDDING, EmbeddingSpec(type, 9, k), (ids, weight))
        assert np.allclose(y, weight.dense()[ids], rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0], ids=lambda t: t.name)
def test_levels_with_fused_arithmetic_give_the_same_bits(type: GGMLType) -> None:
    rng = np.random.default_rng(3)
    weight, x = draw.weight(rng, type, 40, 512), draw.activations(rng, 5, 512)
    results = []
    for level in features.levels():
        if level.float16:
            backend = CpuBackend(level.name, threads=1)
            results.append(backend.run_op(LINEAR, LinearSpec(type, 40, 512), (x, weight))[0])
            backend.close()
    assert results
    assert all(np.array_equal(y, results[0]) for y in results)
