"""Rows of every position, gathered from the engine's steps."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quarrel.engine import Deliver, Loop, Scoring
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


def score(loop: Loop, ids: Sequence[int], want: Literal["logits", "hidden"], width: int, *, whole: bool = False) -> Array:
    """`[T, width]` float32 of a text, one row per token; `whole` runs all of them in one step.

    An interrupt cancels the work and is raised on.
    """
    rows = _Rows(len(ids), width)
    sequence = Scoring(ids, want, rows, whole=whole)
    loop.add(sequence)
    try:
        failure = rows.ended.get()
    except BaseException:
        loop.cancel(sequence)
        raise
    if failure is not None:
        raise failure
    return rows.out
