"""The drawing rule: thresholds, ties, distribution, and rows with nothing to draw."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.ops.sample import draw_token, kept


def frequencies(logits: list[float], n: int = 4000, **options: float) -> np.ndarray:
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    at = (np.arange(n) + 0.5) / n
    drawn = [draw_token(np.array(logits), uniform=u, **settings) for u in at]  # type: ignore[arg-type]
    return np.bincount(drawn, minlength=len(logits)) / n


def test_drawing_follows_softmax() -> None:
    logits = [0.0, 1.0, 2.0, -1.0]
    want = np.exp(logits) / np.exp(logits).sum()
    assert np.abs(frequencies(logits) - want).max() < 1e-3
    hot = np.exp(np.array(logits) / 2) / np.exp(np.array(logits) / 2).sum()
    assert np.abs(frequencies(logits, temperature=2.0) - hot).max() < 1e-3


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert draw_token(np.array([1.0, 3.0, 3.0]), 0.0, 0, 1.0, 0.0, 0.9) == 1


@pytest.mark.parametrize(
    ("options", "kept_ids"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.55}, [0, 1]),
        ({"min_p": 0.3}, [0, 1]),
        ({"top_k": 2, "top_p": 0.6}, [0]),
    ],
)
def test_each_filter_keeps_what_it_says(options: dict[str, float], kept_ids: list[int]) -> None:
    p = np.array([0.5, 0.2, 0.125, 0.125, 0.05])
    settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    assert np.flatnonzero(kept(p, **settings)).tolist() == kept_ids  # type: ignore[arg-type]


def test_bad_logits_never_win_and_an_empty_row_says_so() -> None:
    assert draw_token(np.array([-np.inf, -5.0, np.inf]), 0.0, 0, 1.0, 0.0, 0.5) == 1
    assert draw_token(np.array([np.nan, -5.0, 3.0]), 0.0, 0, 1.0, 0.0, 0.5) == -1
    assert draw_token(np.full(7, np.nan), 1.0, 0, 1.0, 0.0, 0.5) == -1
    assert draw_token(np.full(7, -np.inf), 0.0, 0, 1.0, 0.0, 0.5) == -1


def test_the_largest_uniform_still_draws_a_kept_token() -> None:
    logits = np.zeros(1000)
    logits[500:] = -40.0
    assert draw_token(logits, 1.0, 500, 1.0, 0.0, float(np.nextafter(1.0, 0.0))) == 499
