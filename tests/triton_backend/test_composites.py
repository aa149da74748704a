"""Composites against their own expansion."""

from __future__ import annotations

import pytest

from quarrel.ops.contract import Case, Op
from quarrel.triton_backend.backend import TritonBackend
from tests.composites import CASES, check_expansion


@pytest.mark.parametrize(("op", "case"), [p for p in CASES if p.id and p.id.endswith("-0")])
def test_both_ways_agree(backend: TritonBackend, op: Op, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_expansion(backend, op, case, monkeypatch)
