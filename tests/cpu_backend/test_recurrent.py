"""Scans: no drift over thousands of tokens, the same bits in any batch, a clean start."""

from __future__ import annotations

from typing import Any

import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.ops.contract import Op
from quarrel.ops.delta import DELTA, DELTA_MIX, DeltaMixSpec, DeltaSpec
from quarrel.ops.mixer import MAMBA2_MIX, SCAN1_GATE, Mamba2MixSpec
from quarrel.ops.state import CONV, SCAN1, SCAN2, ConvSpec, Scan1Spec, Scan2Spec
from quarrel.ops.step import ComputeChoice
from tests.recurrences import check_alone, check_cuts, check_drift, check_fresh

MIX = Mamba2MixSpec(Scan2Spec(4, 16, 2, 32), 4, 1e-5)
DELTA_NET = DeltaMixSpec(DeltaSpec(1, 2, 16, 16, 1e-6), 4, 1e-6)
RECURRENT = [
    *((DELTA_MIX, DELTA_NET), (MAMBA2_MIX, MIX), (SCAN1_GATE, Scan1Spec(20, 16)), (SCAN2, MIX.scan)),
    (CONV, ConvSpec(24, 4)),
]
IDS = [op.name for op, _ in RECURRENT]
COMPUTES: tuple[ComputeChoice, ...] = ("float32", "auto")


@pytest.mark.parametrize(
    ("op", "spec"),
    [(SCAN2, Scan2Spec(2, 16, 1, 32)), (SCAN1, Scan1Spec(8, 16)), (DELTA, DELTA_NET.delta)],
    ids=["scan2", "scan1", "delta"],
)
def test_scans_do_not_drift_over_4096_tokens(backend: CpuBackend, op: Op, spec: Any) -> None:
    check_drift(backend, op, spec, 4096, "float32", 2e-6)


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize(("op", "spec"), RECURRENT, ids=IDS)
def test_a_sequence_gives_the_same_bits_in_any_batch(
    backend: CpuBackend, op: Op, spec: Any, compute: ComputeChoice
) -> None:
    check_alone(backend, op, spec, compute)


@pytest.mark.parametrize(("op", "spec"), RECURRENT, ids=IDS)
def test_a_prompt_cut_anywhere_gives_the_same_bits(backend: CpuBackend, op: Op, spec: Any) -> None:
    check_cuts(backend, op, spec, "float32", 64)


@pytest.mark.parametrize(("op", "spec"), RECURRENT, ids=IDS)
def test_a_new_sequence_sees_nothing_of_its_slot(backend: CpuBackend, op: Op, spec: Any) -> None:
    check_fresh(backend, op, spec, "auto")
