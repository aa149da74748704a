"""Rows of every position, gathered from the engine's steps."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quarrel.engine import Deliver, Loop, Scoring, TokenLogprob
from quarrel.engine.chain import token_logprob
from quarrel.errors import QuarrelError

Array = npt.NDArray[Any]


class _Rows(Deliver):
    def __init__(self, tokens: int, width: int) -> None:
        self.out = np.empty((tokens, width), np.float32)
        self.ended: queue.SimpleQueue[QuarrelError | None] = queue.SimpleQueue()

    def rows(self, start: int, rows: Array) -> None:
        self.out[start : start + len(rows)] = rows

    def end(self, failure: QuarrelError | None) -> None:
        self.ended.put(failure)


class _Logprobs(Deliver):
    """Log probabilities of each next token, row by row: the rows themselves are not kept."""

    def __init__(self, ids: Sequence[int], top: int) -> None:
        self._ids, self._top = ids, top
        self.out: list[TokenLogprob] = []
        self.ended: queue.SimpleQueue[QuarrelError | None] = queue.SimpleQueue()

    def rows(self, start: int, rows: Array) -> None:
        for at, row in enumerate(rows, start + 1):
            if at < len(self._ids):
                self.out.append(token_logprob(row, self._ids[at], self._top))

    def end(self, failure: QuarrelError | None) -> None:
        self.ended.put(failure)


def logprobs(loop: Loop, ids: Sequence[int], top: int, adapter: int = 0) -> list[TokenLogprob]:
    """One for each token but the first, with the `top` best alternatives."""
    rows = _Logprobs(ids, top)
    _run(loop, Scoring(ids, "logits", rows, adapter=adapter), rows.ended)
    return rows.out


def score(
    loop: Loop,
    ids: Sequence[int],
    want: Literal["logits", "hidden"],
    width: int,
    *,
    whole: bool = False,
    adapter: int = 0,
) -> Array:
    """`[T, width]` float32 of a text, one row per token; `whole` runs all of them in one step.

    An interrupt cancels the work and is raised on.
    """
    rows = _Rows(len(ids), width)
    _run(loop, Scoring(ids, want, rows, whole=whole, adapter=adapter), rows.ended)
    return rows.out


def _run(loop: Loop, sequence: Scoring, ended: queue.SimpleQueue[QuarrelError | None]) -> None:
    loop.add(sequence)
    try:
        failure = ended.get()
    except BaseException:
        loop.cancel(sequence)
        raise
    if failure is not None:
        raise failure
