"""Every op's cases against its NumPy reference, in both arithmetics; outputs and buffers start as NaN."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.errors import RequestError
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.activation import GATED, GatedSpec
from quarrel.ops.compare import check_case
from quarrel.ops.contract import Case
from quarrel.ops.reference import run_op
from quarrel.ops.sample import SAMPLE
from quarrel.ops.step import ComputeChoice

OPS = {**ALL_OPS, **EXTRA_OPS}
COMPUTES: tuple[ComputeChoice, ...] = ("float32", "auto")


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("name", sorted(OPS))
def test_cases_match_the_reference(backend: CpuBackend, name: str, compute: ComputeChoice) -> None:
    for case in OPS[name].cases():
        check_case(backend, OPS[name], case, compute)


@pytest.mark.parametrize("name", sorted(n for n, op in OPS.items() if op.strategy and n not in ("linear", "sample")))
def test_random_shapes_match_the_reference(backend: CpuBackend, name: str) -> None:
    op = OPS[name]
    assert op.strategy is not None

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(op.strategy(), st.integers(0, 999))
    def run(case: Case, seed: int) -> None:
        check_case(backend, op, case, "float32", seed)

    run()


def test_the_same_tokens_are_drawn(backend: CpuBackend) -> None:
    assert SAMPLE.make is not None
    for seed in range(40):
        rng = np.random.default_rng(seed)
        case = SAMPLE.cases()[seed % len(SAMPLE.cases())]
        inputs = SAMPLE.make(case, rng)
        (got,), (want,) = backend.run_op(SAMPLE, case.spec, inputs), run_op(SAMPLE, case.spec, inputs)
        assert np.array_equal(got, want), (seed, got, want)


def test_wrong_shapes_are_refused(backend: CpuBackend) -> None:
    good, short = np.zeros((3, 8), np.float32), np.zeros((3, 7), np.float32)
    with pytest.raises(RequestError, match="up has 7 along axis 8"):
        backend.run_op(GATED, GatedSpec("silu", 8), (good, short))
    with pytest.raises(RequestError, match="up has 2 along axis T, where the op or its other inputs have 3"):
        backend.run_op(GATED, GatedSpec("silu", 8), (good, good[:2]))
    with pytest.raises(RequestError, match="wanted 2 axes"):
        backend.run_op(GATED, GatedSpec("silu", 8), (good[0], good))
