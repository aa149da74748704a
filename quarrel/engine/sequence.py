"""A run of tokens through the model: what it needs of the cache, and what becomes of the rows that it asks for."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from quarrel.engine.prefix import Node
from quarrel.engine.results import FinishReason
from quarrel.errors import QuarrelError
from quarrel.ops.step import StepOutputs, Want

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why it did not get its blocks. As long as nothing of this is otherwise it need not be asked for again, which takes a
    look at each of its tokens."""

    room: int
    """Blocks that could be had."""
    end: Node
    """As far as its tokens were known."""
    changes: int
    others: tuple[int, int]

    def stands(self, room: int, others: tuple[int, int]) -> bool:
        return room <= self.room and self.end.alive and self.end.changes == self.changes and others == self.others


class Sequence(ABC):
    """Tokens, and how many of them have run. The scheduler and its cache alone set what is not said to be otherwise."""

    want: Want = "tokens"
    every_row = False
    """Whether each token's row is wanted, or the last one's only."""
    whole = False
    """Whether all its tokens must run in one step, because each of them sees every other."""
    keeps_prefix = False
    """Whether the cache may be reused for it, and its own kept when it ends."""
    rank = 0
    """0 goes before 1, for a while; see `scheduler`."""
    waits = False
    """Whether a draw must be known before the next step can be made: its tokens are drawn or guessed here."""
    salt = b""
    """Only sequences of the same salt share what is in the cache."""
    adapter = 0
    """Which of the model's adapters it runs with; 0 is none."""
    seed = 0
    draws = (0.0, 0.0, 1.0, 0.0)
    """How its tokens are drawn: temperature, top_k, top_p and min_p, as the `sample` op takes them."""
    queue_seconds: float | None = None
    total_seconds: float | None = None

    def __init__(self, tokens: Tokens[int], length: int, family: object = None, copies: int = 1) -> None:
        assert 0 < len(tokens) <= length
        self.tokens = list(tokens)
        self.given = len(tokens)
        self.length = length  # cache slots that it may come to fill
        self.family = self if family is None else family  # sequences of one prompt, which wait for the first one's prefill
        self.copies = copies  # how many there are of these
        self.computed = 0  # tokens that the launches so far put into the cache
        self.drawn = 0  # 1 while a launch draws a token that is not known here yet
        self.row = -1  # in which row of that launch
        self.reused = self.furthest = 0  # tokens that were known when it first began; that have run at most
        self.over = False
        self.outcome: FinishReason | None = None  # how it ended, where `settle` knows
        self.failure: QuarrelError | None = None
        self.extra: int | None = None  # a token that was drawn, and may have run, but is no part of `tokens`
        self.submitted = time.perf_counter()
        self.started = self.told = 0.0  # when its first step began, when its last token came
        # The scheduler's: its place in the queue.
        self.turn, self.order = 0.0, 0
        # The cache's: blocks in order (-1 where they are no longer read), the slot of its state, what is in the index, how
        # many blocks of windows are no longer read.
        self.blocks: list[int] = []
        self.window_blocks: list[tuple[int, ...]] = []  # those of groups with a window, () where there are none (any more)
        self.slot = -1
        self.node: Node | None = None
        self.refused: Refusal | None = None
        self.indexed = self.marked = self.shed = 0
        self.snapshots: dict[int, int] = {}

    @property
    def pending(self) -> int:
        """Tokens that have to run before anything new is known."""
        return len(self.tokens) + self.drawn - self.computed

    @property
    def place(self) -> tuple[float, int]:
        """Smaller goes first."""
        return self.turn, self.order

    def rows(self, end: int) -> int:
        """How many results are wanted of a launch of the tokens from `computed` to `end`: the last so many."""
        return int(end == len(self.tokens) + self.drawn)

    def share(self, most: int, alone: bool) -> int:
        """How many tokens a launch of `most` may run of it, 0 if it has to wait; alone: nobody else is in that launch yet.
        What runs whole and is longer than that is then a launch of its own."""
        if self.whole:
            return self.pending if alone or self.pending <= most else 0
        return min(self.pending, most)

    def pieces(self, start: int, end: int) -> int:
        """Into how many launches these of its tokens could be cut."""
        return 1 if self.whole else end - start

    def put_out(self) -> None:  # noqa: B027 (most begin again with all of it)
        """Called when it has gone back to the queue: what has run, and was not settled, will run again."""

    def prepare(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Called while the step that draws its next token runs."""

    def draft(self, room: int) -> Tokens[int]:
        """A guess at up to `room` next tokens, to be checked in the step that draws the first of them."""
        return ()

    def ahead(self) -> int:
        """How many tokens a draft model is to guess, where `draft` had none."""
        return 0

    @abstractmethod
    def settle(self, outputs: StepOutputs, first: int, count: int, draft: Tokens[int]) -> int:
        """Takes rows `first` to `first + count` of a step, and says how many tokens of the draft were right; sets `over`
        when that was the last it needs."""

    @abstractmethod
    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        """Tells the caller that it is over, once its blocks are back. What `settle` concluded goes before `reason`."""


class Scoring(Sequence):
    """A text whose logits or hidden rows are wanted at every position."""

    every_row = True

    def __init__(self, tokens: Tokens[int], want: Want, deliver: Deliver, *, whole: bool = False, adapter: int = 0) -> None:
        super().__init__(tokens, len(tokens))
        self.want, self.whole, self.adapter = want, whole, adapter
        self._deliver = deliver
        self._told = 0

    def rows(self, end: int) -> int:
        # Behind a preemption some rows come again, which have been told.
        return max(0, end - max(self.computed, self._told))

    def settle(self, outputs: StepOutputs, first: int, count: int, draft: Tokens[int]) -> int:
        rows = outputs.logits if self.want == "logits" else outputs.hidden
        assert rows is not None
        self._deliver.rows(self._told, rows[first : first + count])
        self._told += count
        self.over = self._told == len(self.tokens)
        return 0

    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        self._deliver.end(None if self.over else failure or QuarrelError("the run was cancelled"))


class Deliver(ABC):
    """Where the rows of a `Scoring` go; called on the engine's thread, the arrays are the backend's: copy them."""

    @abstractmethod
    def rows(self, start: int, rows: Array) -> None: ...

    @abstractmethod
    def end(self, failure: QuarrelError | None) -> None: ...
