"""A run of tokens through the model: what it needs of the cache, and what becomes of the rows that it asks for."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Tokens
from typing import Any

import numpy.typing as npt

from quarrel.engine.results import FinishReason
from quarrel.ops.step import StepOutputs, Want

Array = npt.NDArray[Any]


class Sequence(ABC):
    """Tokens, and how many of them have run (`computed`). The scheduler alone sets `blocks`, `slot` and `reused`."""

    want: Want = "tokens"
    every_row = False
    """Whether each token's row is wanted, or the last one's only."""
    whole = False
    """Whether all its tokens must run in one step, because each of them sees every other."""
    keeps_prefix = False
    """Whether the cache may be reused for it, and its own kept when it ends."""

    def __init__(self, tokens: Tokens[int], length: int, family: object = None) -> None:
        assert 0 < len(tokens) <= length
        self.tokens = list(tokens)
        self.length = length  # cache slots that it may come to fill
        self.family = self if family is None else family  # sequences of one prompt, which wait for the first one's prefill
        self.computed = 0
        self.reused = 0
        self.blocks: list[int] = []
        self.slot = -1  # where recurrent layers keep its state while it runs
        self.over = False
        self.submitted = time.perf_counter()
        self.started = 0.0

    @property
    def pending(self) -> int:
        """Tokens that have to run before anything new is known."""
        return len(self.tokens) - self.computed

    @abstractmethod
    def settle(self, outputs: StepOutputs, first: int, count: int) -> None:
        """Takes rows `first` to `first + count` of a step; sets `over` when that was the last it needs."""

    @abstractmethod
    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Tells the caller that it is over, once its blocks are back. What `settle` concluded goes before `reason`."""


class Scoring(Sequence):
    """A text whose logits or hidden rows are wanted at every position."""

    every_row = True

    def __init__(self, tokens: Tokens[int], want: Want, deliver: Deliver, *, whole: bool = False) -> None:
        super().__init__(tokens, len(tokens))
        self.want, self.whole = want, whole
        self._deliver = deliver
        self._told = 0

    def settle(self, outputs: StepOutputs, first: int, count: int) -> None:
        rows = outputs.logits if self.want == "logits" else outputs.hidden
        assert rows is not None
        self._deliver.rows(self._told, rows[first : first + count])
        self._told += count
        self.over = self._told == len(self.tokens)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        self._deliver.end(None if self.over else error or "the run was cancelled")


class Deliver(ABC):
    """Where the rows of a `Scoring` go; called on the engine's thread, the arrays are the backend's: copy them."""

    @abstractmethod
    def rows(self, start: int, rows: Array) -> None: ...

    @abstractmethod
    def end(self, error: str | None) -> None: ...
