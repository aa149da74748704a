"""Nothing of another sequence enters a result: NaN, infinities and huge numbers lie wherever a sequence owns nothing."""

from __future__ import annotations

import pytest

from quarrel.ops.attention import ATTENTION
from quarrel.ops.contract import Case, Op
from tests.mlx_backend.cases import running
from tests.poison import attention_cases, check_poison, check_rows, recurrent_cases, row_cases


@pytest.mark.parametrize("case", attention_cases(("auto", "int8", "fp8", "fp8_e5m2")), ids=str)
def test_attention_reads_nothing_of_others(case: Case) -> None:
    with running() as backend:
        check_poison(backend, ATTENTION, case, "float32" if case.dims["KV"] % 20 else "float16")


@pytest.mark.parametrize(("op", "case"), recurrent_cases(), ids=str)
def test_a_recurrent_layer_reads_nothing_of_others(op: Op, case: Case) -> None:
    with running() as backend:
        check_poison(backend, op, case, "float16")


@pytest.mark.parametrize(("op", "case"), row_cases(), ids=str)
def test_a_row_of_nan_shows_and_stays_alone(op: Op, case: Case) -> None:
    with running() as backend:
        check_rows(backend, op, case, "float16")
