"""Nothing of another sequence enters a result: NaN, infinities and huge numbers lie wherever a sequence owns nothing."""

from __future__ import annotations

import pytest

from quarrel.ops.attention import ATTENTION
from quarrel.ops.contract import Case, Op
from quarrel.triton_backend.attention import paged
from quarrel.triton_backend.attention.records import Warps
from quarrel.triton_backend.backend import TritonBackend
from tests.poison import attention_cases, check_poison, check_rows, recurrent_cases, row_cases

# Prompts have more to do than an interpreter does quickly; those of the contract's cases are poisoned too.
CASES = [
    Case(case.spec, case.dims | {"KV": min(case.dims["KV"], 150)})
    for case in attention_cases(("auto", "int8", "fp8", "fp8_e5m2"))
    if case.dims["Q"] <= 5
]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of maxima over NaN, in the interpreter


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_reads_nothing_of_others(backend: TritonBackend, case: Case) -> None:
    check_poison(backend, ATTENTION, case, "float32" if case.dims["KV"] % 20 else "float16")


@pytest.mark.parametrize("case", [case for case in CASES if case.dims["Q"] == 1 and case.spec.window > 1], ids=str)
def test_warps_read_nothing_of_others(backend: TritonBackend, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "warps_for", lambda *_: Warps(2, 16, 3))
    check_poison(backend, ATTENTION, case, "float16")


@pytest.mark.parametrize(("op", "case"), recurrent_cases(), ids=str)
def test_a_recurrent_layer_reads_nothing_of_others(backend: TritonBackend, op: Op, case: Case) -> None:
    check_poison(backend, op, case, "float16")


@pytest.mark.parametrize(("op", "case"), row_cases(), ids=str)
def test_a_row_of_nan_shows_and_stays_alone(backend: TritonBackend, op: Op, case: Case) -> None:
    check_rows(backend, op, case, "float16")
