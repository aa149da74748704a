"""Where the shared reference data lies: beside the checkout, or where QUARREL_CASES points; beside that a second set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CASES = Path(os.environ.get("QUARREL_CASES", Path(__file__).resolve().parents[2] / "shared" / "cases"))
CASE_SETS = (CASES, CASES.with_name(f"{CASES.name}2"))


def need_cases(*names: str) -> Path:
    """The folder of reference cases, or one named inside it or the second set; skips (counted) where it is absent."""
    found = [path for cases in CASE_SETS if (path := cases.joinpath(*names)).exists()]
    if not found:
        pytest.skip(f"reference data {'/'.join(names) or 'cases'} not beside the checkout")
    return found[0]
