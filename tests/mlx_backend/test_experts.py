"""Experts by kind of row: tokens that decode, tokens of prompts, and both in one batch, in every block format."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.registry import REGISTRY
from quarrel.mlx_backend.run_op import run_op
from quarrel.mlx_backend.runtime.launch import Batch, Rows
from quarrel.ops import draw, reference
from quarrel.ops.contract import Array, Case, Op, rel_error
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ExpertDownSpec, ExpertUpSpec
from tests.mlx_backend.cases import running

UP = ExpertUpSpec(GGMLType.MXFP4, 4, 2, 40, 288, "oai", bias=True)
DOWN = ExpertDownSpec(GGMLType.MXFP4, 4, 2, 40, 160, bias=True)


def run(op: Op, spec: object, inputs: tuple[object, ...], single: list[bool]) -> Array:
    rows = Rows(np.array(single))
    (got,) = run_op(REGISTRY, op, spec, inputs, "float16", Batch(rows, rows))  # type: ignore[arg-type]
    assert isinstance(got, np.ndarray)
    return got


@pytest.mark.parametrize(("op", "spec"), [(EXPERT_UP, UP), (EXPERT_DOWN, DOWN)], ids=["up", "down"])
def test_a_row_is_computed_by_its_kind_alone(op: Op, spec: object) -> None:
    inputs = op.make(Case(spec, {"T": 7}), np.random.default_rng(0))  # type: ignore[misc]
    (want,) = reference.run_op(op, spec, inputs)
    kinds = [True, False, False, True, False, True, False]
    with running():
        alone, tiled, mixed = (run(op, spec, inputs, k) for k in ([True] * 7, [False] * 7, kinds))
    for got in (alone, tiled):
        assert rel_error(got, want) <= op.tolerance["float16"]  # type: ignore[arg-type]
    for row, single in enumerate(kinds):
        assert np.array_equal(mixed[row], (alone if single else tiled)[row])


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda t: t.name)
def test_every_format_alone_and_in_tiles(type: GGMLType) -> None:
    spec = ExpertDownSpec(type, 3, 2, 7, 256)
    inputs = EXPERT_DOWN.make(Case(spec, {"T": 2}), np.random.default_rng(1))  # type: ignore[misc]
    (want,) = reference.run_op(EXPERT_DOWN, spec, inputs)
    with running():
        for single in (True, False):
            assert rel_error(run(EXPERT_DOWN, spec, inputs, [single] * 2), want) <= EXPERT_DOWN.tolerance["float16"]  # type: ignore[arg-type]


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda t: t.name)
def test_every_format_of_gate_and_up(type: GGMLType) -> None:
    spec = ExpertUpSpec(type, 3, 2, 7, 256, "silu")
    inputs = EXPERT_UP.make(Case(spec, {"T": 2}), np.random.default_rng(1))  # type: ignore[misc]
    (want,) = reference.run_op(EXPERT_UP, spec, inputs)
    with running():
        for single in (True, False):
            assert rel_error(run(EXPERT_UP, spec, inputs, [single] * 2), want) <= EXPERT_UP.tolerance["float16"]  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [77, 40])
def test_widths_that_fill_no_block(k: int) -> None:
    spec = ExpertUpSpec(GGMLType.F16, 3, 2, 9, k, "silu")
    inputs = EXPERT_UP.make(Case(spec, {"T": 3}), np.random.default_rng(2))  # type: ignore[misc]
    (want,) = reference.run_op(EXPERT_UP, spec, inputs)
    with running():
        for single in (True, False):
            assert rel_error(run(EXPERT_UP, spec, inputs, [single] * 3), want) <= EXPERT_UP.tolerance["float16"]  # type: ignore[arg-type]


@pytest.mark.parametrize("types", [("Q4_K", "Q6_K"), ("F16", "Q4_K")], ids=" ".join)
def test_gate_and_up_of_two_formats(types: tuple[str, str]) -> None:
    """As in files that were told a type for each tensor."""
    spec = ExpertUpSpec(GGMLType[types[0]], 3, 2, 19, 256, "silu")
    x, ids, *_ = EXPERT_UP.make(Case(spec, {"T": 3}), np.random.default_rng(3))  # type: ignore[misc]
    gate, up = (draw.weight(np.random.default_rng(i), GGMLType[type], spec.rows, spec.k) for i, type in enumerate(types))
    (want,) = reference.run_op(EXPERT_UP, spec, (x, ids, gate, up))
    with running():
        for single in (True, False):
            got = run(EXPERT_UP, spec, (x, ids, gate, up), [single] * 3)
            assert rel_error(got, want) <= EXPERT_UP.tolerance["float16"]
