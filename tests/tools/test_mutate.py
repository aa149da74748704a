"""Edits of Python code: each is one edit, and a fork that imports it is judged by the module's tests."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from tools import mutate
from tools.mutants import Tally, equivalent

SOURCE = '''
LIMIT = 10

def low(xs: list[int], limit: int = 3) -> bool:
    """Whether all are below."""
    assert limit > 0, "not so"
    for x in xs:
        if x < 0 or not xs:
            continue
        if x >= limit + 1:
            raise ValueError(f"{x + 1}")
    return min(xs) is not None
'''


def test_each_mutant_has_one_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    (tmp_path / "low.py").write_text(SOURCE)
    made = list(mutate.mutants("low.py"))
    wanted = ["Lt to LtE", "to And", "no not", "to break", "GtE to Gt", "Add to Sub", "IsNot to Is", "min to max", "0 to 1"]
    assert Counter(m.what for m in made) == Counter([*wanted, "3 to 4", "1 to 2"])
    assert {m.line for m in made if m.what == "GtE to Gt"} == {10}


def test_what_the_tests_notice_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = tmp_path / "test_waits.py"
    test.write_text(
        "from quarrel.server.limits import _Bucket\n\n"
        "def test_a_bucket():\n    assert _Bucket(60, 0, 0).wait(1, 0) == 1 and _Bucket(60, 60, 0).wait(1, 0) == 0\n"
    )
    file = "quarrel/server/limits.py"
    monkeypatch.setattr(mutate, "TARGETS", {file: (str(test),)})
    chosen = {"return missing * 60 / self.rate": "Div to Mult", "entry.streams -= 1": "left out"}
    todo = [m for m in mutate.mutants(file) if chosen.get(m.text) == m.what]
    judged = {m.text: noticed for m, noticed in mutate.judge(todo, {file: 120.0}, 2, time.monotonic() + 120)}
    assert judged == {"return missing * 60 / self.rate": "a test", "entry.streams -= 1": ""}


def test_what_changes_nothing_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    table = (("< to <=", "i < n", "never equal"),)
    tally = Tally("edits")
    tally.add("a", "a test")
    tally.add("b", "", equivalent("< to <=", "while i < n:", table))
    tally.add("c", "", equivalent("> to >=", "while i < n:", table))
    assert tally.report() == {
        "made": 2,
        "caught": 1,
        "by": {"a test": 1},
        "equivalent": ["b: never equal"],
        "missed": ["c"],
    }
    assert "edits 1/2 MISSED: c" in capsys.readouterr().out
