"""Where the shared reference data lies: beside the checkout, or where QUARREL_CASES points."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CASES = Path(os.environ.get("QUARREL_CASES", Path(__file__).resolve().parents[2] / "shared" / "cases"))


def need_cases(*names: str) -> Path:
    """The folder of reference cases, or one named inside it; skips (counted) where it is absent."""
    path = CASES.joinpath(*names)
    if not path.exists():
        pytest.skip(f"reference data {'/'.join(names) or 'cases'} not beside the checkout")
    return path
