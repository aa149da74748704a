"""Scans in chunks: no drift over thousands of tokens, the same bits in any batch and however a prompt is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quarrel.ops.contract import Compute, Op, rel_error
from quarrel.ops.delta import DELTA, DELTA_MIX, DeltaMixSpec, DeltaSpec
from quarrel.ops.mixer import MAMBA2_MIX, SCAN1_GATE, Mamba2MixSpec
from quarrel.ops.reference import run_op
from quarrel.ops.state import CONV, SCAN1, SCAN2, ConvSpec, Scan1Spec, Scan2Spec
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.recurrent import mamba2_step
from quarrel.triton_backend.runtime.launch import INTERPRETED
from tests.recurrences import check_alone, check_cuts, check_drift, check_fresh, drawn, split

MIX = Mamba2MixSpec(Scan2Spec(2, 16, 1, 16), 4, 1e-5)
DELTA_NET = DeltaMixSpec(DeltaSpec(1, 2, 16, 16, 1e-6), 4, 1e-6)
RECURRENT = [
    (DELTA_MIX, DELTA_NET),
    (MAMBA2_MIX, MIX),
    (SCAN1_GATE, Scan1Spec(20, 8)),
    (SCAN2, MIX.scan),
    (CONV, ConvSpec(24, 4)),
]
IDS = [op.name for op, _ in RECURRENT]


@pytest.mark.parametrize(
    ("op", "spec", "tokens"),
    [
        (SCAN2, Scan2Spec(1, 16, 1, 16), 4096),
        (DELTA, DeltaSpec(1, 1, 16, 16, 1e-6), 4096),
        (SCAN1, Scan1Spec(8, 4), 640 if INTERPRETED else 4096),
    ],
    ids=["scan2", "delta", "scan1"],
)
def test_chunks_do_not_drift_over_thousands_of_tokens(backend: TritonBackend, op: Op, spec: Any, tokens: int) -> None:
    check_drift(backend, op, spec, tokens, "float16", 1e-3)


def test_steps_do_not_drift(backend: TritonBackend) -> None:
    check_drift(
        backend, SCAN2, Scan2Spec(1, 8, 1, 8), 1024 if INTERPRETED else 4096, "float32", 2e-6 if INTERPRETED else 4e-6
    )


@pytest.mark.parametrize("compute", ["float32", "float16"])
@pytest.mark.parametrize(("op", "spec"), RECURRENT, ids=IDS)
def test_a_sequence_gives_the_same_bits_in_any_batch(backend: TritonBackend, op: Op, spec: Any, compute: Compute) -> None:
    check_alone(backend, op, spec, compute)


@pytest.mark.parametrize(("op", "spec"), RECURRENT, ids=IDS)
def test_a_prompt_cut_between_chunks_gives_the_same_bits(backend: TritonBackend, op: Op, spec: Any) -> None:
    check_cuts(backend, op, spec, "float16", 64)


@pytest.mark.parametrize(("op", "spec"), RECURRENT, ids=IDS)
def test_a_new_sequence_sees_nothing_of_its_slot(backend: TritonBackend, op: Op, spec: Any) -> None:
    check_fresh(backend, op, spec, "float16")


def test_many_sequences_take_larger_parts_of_the_state_with_the_same_bits(backend: TritonBackend) -> None:
    spec = Mamba2MixSpec(Scan2Spec(2, 64, 1, 128), 4, 1e-5)
    many = [(i, 1, 9, i) for i in range(mamba2_step._MANY)]
    inputs = drawn(MAMBA2_MIX, spec, len(many), 1)
    want = run_op(MAMBA2_MIX, spec, split(MAMBA2_MIX, spec, inputs, many))
    got = backend.run_op(MAMBA2_MIX, spec, split(MAMBA2_MIX, spec, inputs, many), "float32")
    few = backend.run_op(MAMBA2_MIX, spec, split(MAMBA2_MIX, spec, inputs, many[:2]), "float32")
    assert np.array_equal(got[0][:2], few[0])  # type: ignore[index]
    for found, right in zip(got, want, strict=True):
        assert rel_error(found, right) <= MAMBA2_MIX.tolerance["float32"]
