"""Short texts side by side: one sequence to the scheduler, many to a step, one row of each in return.

For encoders, whose texts run whole and leave nothing behind. What a text costs here is its share of a few array operations.
Where steps have become shorter for want of memory, the texts of a sequence run in several.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quarrel.engine.results import FinishReason
from quarrel.engine.scheduler import Part
from quarrel.engine.sequence import Deliver, Sequence
from quarrel.errors import QuarrelError
from quarrel.ops.step import StepInputs, StepOutputs

Array = npt.NDArray[Any]
Row = Literal["mean", "first", "last"]


class Packed(Sequence):
    """Texts of which one row each is wanted: the mean of all, the first or the last."""

    every_row = True
    whole = True

    def __init__(self, texts: Tokens[Tokens[int]], row: Row, deliver: Deliver) -> None:
        tokens = list(chain.from_iterable(texts))
        super().__init__(tokens, len(tokens))
        self.want = "mean" if row == "mean" else "hidden"
        self.row_of_each = row
        self._deliver = deliver
        self._texts, self._delivered = len(texts), 0
        self._begin(np.fromiter(map(len, texts), np.int32, len(texts)))

    def texts(self, start: int, end: int) -> slice:
        """Which texts these tokens are; both are borders of texts."""
        first, last = np.searchsorted(self._starts, (start, end)).tolist()
        return slice(first, last)

    def rows(self, end: int) -> int:
        return self.pieces(self.computed, end)

    def pieces(self, start: int, end: int) -> int:
        texts = self.texts(start, end)
        return int(texts.stop - texts.start)

    def chunk(self, most: int, alone: bool) -> int:
        if self.pending <= most or not alone:
            return super().chunk(most, False)
        first = int(np.searchsorted(self._starts, self.computed))
        last = int(np.searchsorted(self._starts, self.computed + most, "right")) - 1
        return int(self._starts[max(last, first + 1)]) - self.computed

    def on_preempt(self) -> None:
        done = self._delivered - (self._texts - len(self.lengths))
        self.tokens = self.tokens[self._starts[done] :]
        self._begin(self.lengths[done:])

    def accept(self, outputs: StepOutputs, first: int, count: int, draft: Tokens[int]) -> int:
        rows = outputs.mean if self.want == "mean" else outputs.hidden
        assert rows is not None
        self._deliver.rows(self._delivered, rows[first : first + count])
        self._delivered += count
        self.finished = self._delivered == self._texts
        return 0

    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        self._deliver.end(None if self.finished else failure or QuarrelError("the run was cancelled"))

    def _begin(self, lengths: Array) -> None:
        """With the texts that are left."""
        self.lengths = lengths
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def laid_out(inputs: StepInputs, parts: Tokens[Part], block_size: int) -> StepInputs:
    """The inputs with a sequence for each text; those of a batch without packed texts as they are."""
    if not any(isinstance(p.sequence, Packed) for p in parts):
        return inputs
    # Who shares a step with packed texts runs whole too: its positions begin at 0, and each of its rows may be wanted.
    each = [_lengths(p) for p in parts]
    lengths = np.concatenate(each)
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    firsts = accumulate((len(texts) for texts in each), initial=0)
    rows = [_rows(p, starts[at : at + len(texts) + 1]) for p, at, texts in zip(parts, firsts, each)]
    return replace(
        inputs,
        positions=np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lengths),
        query_start=starts,
        kv_len=lengths,
        block_table=np.zeros((len(lengths), -(-int(lengths.max()) // block_size)), np.int32),
        out_rows=np.concatenate(rows),
        state_slots=None,
    )


def _lengths(part: Part) -> Array:
    """Of its texts."""
    if not isinstance(part.sequence, Packed):
        return np.array([part.count], np.int32)
    return part.sequence.lengths[part.sequence.texts(part.start, part.start + part.count)]


def _rows(part: Part, starts: Array) -> Array:
    """Rows that are wanted of a part whose texts lie between `starts`."""
    if not isinstance(part.sequence, Packed):
        return np.arange(starts[1] - part.rows, starts[1], dtype=np.int32)
    return starts[1:] - 1 if part.sequence.row_of_each == "last" else starts[:-1]
