"""What a request lays on single tokens, as the op `adjust` takes it: biases, bans and the tokens that penalties look at.

Between two steps this runs for every row of a batch: tokens are kept as an array, of which a row has a view.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quarrel.engine.params import SamplingParams
from quarrel.ops.adjust import MOST_LISTED
from quarrel.ops.step import Lists

Array = npt.NDArray[Any]
Strengths = tuple[float, float, float]
OFF: Strengths = (1.0, 0.0, 0.0)


class Listed:
    """Of one sequence."""

    def __init__(self, params: SamplingParams, stop_ids: Collection[int], n_prompt: int) -> None:
        p = params
        self.strengths = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) if p.penalises else OFF
        """Repetition, presence and frequency."""
        self._last = p.penalty_last_n if p.penalises else 0
        self._free_from = n_prompt + p.min_tokens  # tokens behind which stop tokens may be drawn
        biases = np.array([*p.logit_bias.values()], np.float32)
        self._biased = np.array([*p.logit_bias], np.int32), biases
        banned = np.array(sorted(stop_ids), np.int32) if p.min_tokens else np.zeros(0, np.int32)
        bans = np.full(len(banned), -np.inf, np.float32)
        self._banned = np.concatenate([self._biased[0], banned]), np.concatenate([biases, bans])
        self._seen, self._count = np.zeros(0, np.int32), 0

    def bans(self, n_vocab: int) -> bool:
        """Whether it may leave none of so many tokens to draw."""
        return int(np.isneginf(self._banned[1]).sum()) >= n_vocab

    @property
    def forbids(self) -> bool:
        """Whether there are tokens that it bans."""
        return bool(np.isneginf(self._banned[1]).any())

    @property
    def empty(self) -> bool:
        return not self._last and not len(self._banned[0])

    @property
    def fits(self) -> bool:
        """Whether its lists are never longer than the op takes."""
        return self._last >= 0 and max(self._last - 1, 0) + len(self._banned[0]) <= MOST_LISTED

    def behind(self, tokens: Sequence[int], draft: Sequence[int], end: int) -> tuple[Array, Array, Array]:
        """For the draw behind `end` tokens, with those of a draft, of which the last one may not be known: the ids that it
        has seen without that one, those with a bias, and the biases."""
        ids, biases = self._banned if end < self._free_from else self._biased
        return self._before(tokens, draft, max(0, end - self._last), end - 1) if self._last else ids[:0], ids, biases

    def _before(self, tokens: Sequence[int], draft: Sequence[int], first: int, end: int) -> Array:
        """Tokens `first` to `end`."""
        if end > len(self._seen):
            self._seen = np.concatenate([self._seen, np.zeros(end + 64, np.int32)])
        known = min(end, len(tokens))
        if known > self._count:
            self._seen[self._count : known] = tokens[self._count : known]
            self._count = known
        if end > known:
            self._seen[known:end] = draft[: end - known]
            return self._seen[first:end].copy()  # the next draft lies there too
        return self._seen[first:end]


Row = tuple[Listed | None, Sequence[int], Sequence[int], int]
"""What is laid on tokens, the tokens, a draft behind them, and behind how many of both the row draws."""


def lists_of(rows: Sequence[Row]) -> Lists:
    """Of the rows of a step."""
    pieces: list[Array] = []
    biased: list[tuple[int, Array]] = []
    counted: list[int] = []
    ends, strengths, at = [], [], 0
    for listed, tokens, draft, end in rows:
        if listed is not None:
            seen, ids, biases = listed.behind(tokens, draft, end)
            pieces += (seen, ids)
            counted += (len(seen), len(ids))
            at += len(seen) + len(ids)
            if len(ids):
                biased.append((at, biases))
        ends.append(at)
        strengths.append(OFF if listed is None else listed.strengths)
    all_biases = np.zeros(at, np.float32)
    for stop, biases in biased:
        all_biases[stop - len(biases) : stop] = biases
    counts = np.repeat(np.tile(np.array([1, 0], np.float32), len(counted) // 2), counted)
    columns = np.array(strengths, np.float32).T.copy()
    return Lists(np.array(ends, np.int32), np.concatenate(pieces), counts, all_biases, *columns)
