"""Composites against their own expansion, on the CPU and on Metal (Triton: tests/triton_backend/test_composites.py)."""

from __future__ import annotations

import pytest

from quarrel.ops.contract import Case, Op
from quarrel.ops.registry import backend
from tests.composites import CASES, check_expansion
from tests.mlx_backend.cases import running


@pytest.mark.parametrize(("op", "case"), CASES)
def test_on_the_cpu(op: Op, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check_expansion(backend("cpu"), op, case, monkeypatch)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_on_metal(op: Op, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as mlx:
        check_expansion(mlx, op, case, monkeypatch)
