"""Short texts side by side: one sequence to the scheduler, many to a step, one row of each in return.

For encoders, whose texts run whole and leave nothing behind. What a text costs here is its share of a few array operations.
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
        self.lengths = np.fromiter(map(len, texts), np.int32, len(texts))
        self._deliver = deliver

    def rows(self, end: int) -> int:
        return len(self.lengths)

    def settle(self, outputs: StepOutputs, first: int, count: int, draft: Tokens[int]) -> int:
        rows = outputs.mean if self.want == "mean" else outputs.hidden
        assert rows is not None
        self._deliver.rows(0, rows[first : first + count])
        self.over = True
        return 0

    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        self._deliver.end(None if self.over else failure or QuarrelError("the run was cancelled"))


def laid_out(inputs: StepInputs, parts: Tokens[Part], block_size: int) -> StepInputs:
    """The inputs with a sequence for each text; those of a batch without packed texts as they are."""
    if not any(isinstance(p.sequence, Packed) for p in parts):
        return inputs
    # Who shares a step with packed texts runs whole too: its positions begin at 0, and each of its rows may be wanted.
    each = [p.sequence.lengths if isinstance(p.sequence, Packed) else np.array([p.count], np.int32) for p in parts]
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


def _rows(part: Part, starts: Array) -> Array:
    """Rows that are wanted of a part whose texts lie between `starts`."""
    if not isinstance(part.sequence, Packed):
        return np.arange(starts[1] - part.rows, starts[1], dtype=np.int32)
    return starts[1:] - 1 if part.sequence.row_of_each == "last" else starts[:-1]
