"""A short run of `python -m fuzz.http`, and what longer ones have found."""

from __future__ import annotations

from pathlib import Path

from fuzz.http import fuzz, serving


def test_whatever_comes_is_answered_or_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as live:
        found = fuzz(live, 60, 0)
        assert found["sockets"] == 6
        assert found["body 200"] > 5 < found["body 400"]
