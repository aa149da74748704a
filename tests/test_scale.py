"""The formulas of docs/scale.md against the recorded runs on two GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINES = (ROOT / "bench" / "results" / "2026-11-21-parallel-h200x2-one-shot.jsonl").read_text("utf-8").splitlines()
RECORD = [json.loads(line) for line in LINES]
PAGE = (ROOT / "docs" / "scale.md").read_text("utf-8")
SUMS = RECORD[0]
SPEED = {(r["test"], r["ranks"]): r["tok_s"] for r in RECORD if "tok_s" in r}
WEIGHTS = {r["ranks"]: r["weights"] for r in RECORD if "tok_s" in r}
COUNT = 2 * 32
"""Sums of a step."""
NCCL = {"tg128": 557.0, "tg128 x32 @ d128": 6788.0}
"""Tokens a second on two GPUs without our own sums, as docs/parallel.md has them."""


def solved(test: str, rows: int, own_us: float) -> tuple[float, float]:
    """Bytes of weights a second, and the seconds of a step that do not divide."""
    one, two = (rows / SPEED[test, ranks] for ranks in (1, 2))
    rate = (WEIGHTS[1] - WEIGHTS[2]) / (one - two + COUNT * own_us * 1e-6)
    return rate, one - WEIGHTS[1] / rate


def test_a_long_prompt_divides_but_for_its_sums() -> None:
    predicted = 4096 / (4096 / SPEED["pp4096", 1] / 2 + COUNT * 2 * SUMS["nccl_32768KiB_us"] * 1e-6)
    assert predicted == pytest.approx(SPEED["pp4096", 2], rel=0.03)
    assert f"{predicted:,.0f}"[:4] == "50,5"
    assert "50,500 tokens/s" in PAGE


@pytest.mark.parametrize(("test", "rows", "size", "page"), [("tg128", 1, 16, 411), ("tg128 x32 @ d128", 32, 512, 6920)])
def test_what_the_formula_says_of_slower_sums(test: str, rows: int, size: int, page: int) -> None:
    rate, rest = solved(test, rows, SUMS[f"one_shot_{size}KiB_us"])
    predicted = rows / (rest + WEIGHTS[2] / rate + COUNT * SUMS[f"nccl_{size}KiB_us"] * 1e-6)
    assert predicted == pytest.approx(page, rel=0.002)
    assert f"{page:,} tokens/s" in PAGE
    assert (abs(predicted / NCCL[test] - 1) < 0.03) == (rows == 32)  # for one row the page says that it is wrong
