"""Nothing of another sequence enters a result: NaN, infinities and huge numbers lie wherever a sequence owns nothing."""

from __future__ import annotations

import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.ops.attention import ATTENTION
from quarrel.ops.contract import Case, Op
from quarrel.ops.kv import KV_TYPES
from tests.poison import attention_cases, check_poison, check_rows, recurrent_cases, row_cases


@pytest.mark.parametrize("case", attention_cases(KV_TYPES), ids=str)
def test_attention_reads_nothing_of_others(backend: CpuBackend, case: Case) -> None:
    check_poison(backend, ATTENTION, case, "float32" if case.dims["KV"] % 20 else "auto")


@pytest.mark.parametrize(("op", "case"), recurrent_cases(), ids=str)
def test_a_recurrent_layer_reads_nothing_of_others(backend: CpuBackend, op: Op, case: Case) -> None:
    check_poison(backend, op, case, "auto")


@pytest.mark.parametrize(("op", "case"), row_cases(), ids=str)
def test_a_row_of_nan_shows_and_stays_alone(backend: CpuBackend, op: Op, case: Case) -> None:
    check_rows(backend, op, case, "auto")
