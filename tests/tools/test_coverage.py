"""The page of which test runs what is the tests' own, and every promised cell has a test."""

from __future__ import annotations

import pytest

from quarrel.ops import ALL_OPS
from quarrel.ops.formats import WEIGHT_TYPES
from tests.paths import need_cases
from tools import coverage


def test_no_promised_cell_is_empty() -> None:
    need_cases()
    assert coverage.missing() == []
    assert len(coverage.promised()) > 100


def test_the_page_is_that_of_the_tests() -> None:
    need_cases()
    if coverage.everything():
        pytest.skip("with everything asked for, or a GPU, the tests have more parameters than the page")
    assert coverage.PAGE.read_text("utf-8") == coverage.page(), "run python -m tools.coverage"


def test_a_cell_without_a_test_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    need_cases()
    whole = coverage.facts()
    fewer = {k: v for k, v in whole.items() if k != ("mlx", coverage.Fact("linear", WEIGHT_TYPES[3]))}
    monkeypatch.setattr(coverage, "facts", lambda: fewer)
    assert coverage.missing() == [f"linear {WEIGHT_TYPES[3].name} on mlx"]


def test_parameters_are_those_that_pytest_gives() -> None:
    @pytest.mark.parametrize("b", [3, pytest.param(4, id="four")])
    @pytest.mark.parametrize(("op", "case"), [(ALL_OPS["norm"], 1), pytest.param(ALL_OPS["add"], 2)])
    def some(op: object, case: int, b: int) -> None: ...

    given = {(p["op"].name, p["case"], p["b"]) for p in coverage.parameters(some)}
    assert given == {("norm", 1, 3), ("add", 2, 3), ("norm", 1, 4), ("add", 2, 4)}
