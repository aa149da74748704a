"""Every case of every op but the linear maps, all accesses checked; outputs hold NaN before, so gaps show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quarrel.errors import UnsupportedOp
from quarrel.mlx_backend.registry import REGISTRY
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.contract import Case, Op
from quarrel.ops.kv import KV_TYPES
from quarrel.ops.step import ComputeChoice
from tests.mlx_backend.cases import UNTYPED, check_case, running, same_bits
from tests.mlx_backend.emulated import CHECKED

LINEAR = ("linear", "linear_add", "norm_linear", "norm_gate_up")
"""In test_linear.py."""
OPS = [op for name, op in {**ALL_OPS, **EXTRA_OPS}.items() if name not in LINEAR]
CASES = [pytest.param(op, case, id=f"{op.name}-{i}") for op in OPS for i, case in enumerate(op.cases())]
SMALLEST = [pytest.param(op, op.cases()[0], id=op.name) for op in OPS]
EXACT_KINDS = ("sample", "route", "embedding", "gather_rows", "cap", "add_row", "logprobs")
"""Ops of float32 and integers alone: the compute type changes nothing in them."""


def test_every_primitive_has_an_implementation() -> None:
    wanted = {name for name, op in {**ALL_OPS, **EXTRA_OPS}.items() if op.expand is None}
    assert wanted <= set(REGISTRY.ops())


def test_a_cache_of_another_type_is_declined_with_what_would_do() -> None:
    op = ALL_OPS["attention"]
    case = replace(op.cases()[0], dims=op.cases()[0].dims | {"kv": KV_TYPES.index("bfloat16")})
    with running() as backend, pytest.raises(UnsupportedOp, match="use kv_cache='auto', or 'int8'"):
        check_case(backend, op, case, "float16")


@pytest.mark.parametrize(("op", "case"), CASES)
def test_case_matches_the_reference_in_half_precision(op: Op, case: Case) -> None:
    with running(CHECKED) as backend:
        check_case(backend, op, case, "float16")


@pytest.mark.parametrize(("op", "case"), [p for p in CASES if p.values[0].name not in EXACT_KINDS])  # type: ignore[attr-defined]
def test_case_matches_the_reference_in_float32(op: Op, case: Case) -> None:
    with running() as backend:
        check_case(backend, op, case, "float32")


@pytest.mark.parametrize(("op", "case"), [p for p in SMALLEST if p.values[0].name not in EXACT_KINDS])  # type: ignore[attr-defined]
def test_case_matches_the_reference_in_bfloat16(op: Op, case: Case) -> None:
    with running() as backend:
        check_case(backend, op, case, "bfloat16")


@pytest.mark.parametrize(("op", "case"), SMALLEST)
def test_no_schedule_changes_a_bit(op: Op, case: Case) -> None:
    assert op.make is not None
    inputs = op.make(case, np.random.default_rng(0))
    compute: ComputeChoice = "float16"
    with running() as backend:
        first = backend.run_op(op, case.spec, inputs, compute)
    for seed in (1, 2):
        with running(replace(UNTYPED, seed=seed)) as backend:
            assert same_bits(backend.run_op(op, case.spec, inputs, compute), first)
