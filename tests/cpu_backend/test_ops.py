"""Every op's cases against its NumPy reference, in both arithmetics; outputs and buffers start as NaN."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.errors import RequestError
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.activation import GATED, GatedSpec
from quarrel.ops.compare import check_case
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
