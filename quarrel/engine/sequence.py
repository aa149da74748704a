"""A run of tokens through the model: what it has of the cache, and what becomes of the rows that it wants."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from quarrel.engine.images import Sight
from quarrel.engine.listed import Listed
from quarrel.engine.prefix import Node
from quarrel.engine.results import FinishReason
from quarrel.errors import QuarrelError
from quarrel.ops.step import StepOutputs, Want

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a sequence did not get its blocks. It is not tried again before this changes."""

    room: int
    """Blocks that could be had."""
    end: Node
    """As far as its tokens were known."""
    changes: int
    others: tuple[int, int]

    def stands(self, room: int, others: tuple[int, int]) -> bool:
        return room <= self.room and self.end.alive and self.end.changes == self.changes and others == self.others


@dataclass(slots=True)
class CacheState:
    """What a sequence has of the cache. Written by `Cache` alone."""

    blocks: list[int] = field(default_factory=list)
    """In order; -1 where they are no longer read."""
    window_blocks: list[tuple[int, ...]] = field(default_factory=list)
    """Those of window groups; () where there are none (any more)."""
    freed: int = 0
    """Blocks, from the first, that lie behind the window."""
    node: Node | None = None
    """Of the prefix tree, the last one that it stands on."""
    indexed: int = 0
    """Blocks that are in the prefix tree; -1 where none can be added any more."""
    snapshots: dict[int, int] = field(default_factory=dict)
    """Copies of its recurrent state: tokens seen -> slot."""
    snapshot_at: int = 0
    """Tokens seen at the last one."""
    refusal: Refusal | None = None
    found: int = 0
    """Tokens that were in the cache already when it got its blocks."""


class Sequence(ABC):
    """Tokens, and how many of them have run.

    Class attributes and the constructor's arguments are facts of the request, which nobody changes (but `keeps_prefix`,
    which a broken step takes away). Everything else is grouped by who writes it.
    """

    want: Want = "tokens"
    every_row = False
    """Whether each token's row is wanted, or the last one's only."""
    whole = False
    """Whether all its tokens must run in one step, because each of them sees every other."""
    keeps_prefix = False
    """Whether it may start from the prefix cache, and leaves its own blocks there when it ends."""
    rank = 0
    """0 goes before 1, for a while; see `scheduler`."""
    waits = False
    """Whether its next step cannot be made before its token is known: the host samples or drafts."""
    drafts = False
    """Whether a draft model may be asked for it."""
    salt = b""
    """Only sequences of the same salt share what is in the cache."""
    adapter = 0
    """Which of the model's adapters it runs with; 0 is none."""
    seed = 0
    draws = (0.0, 0.0, 1.0, 0.0)
    """temperature, top_k, top_p and min_p, as the `sample` op takes them."""
    listed: Listed | None = None
    """Biases, bans and penalties that the device lays on its logits."""
    sight: Sight | None = None
    """Its prompt's images."""
    queue_seconds: float | None = None
    total_seconds: float | None = None

    def __init__(self, tokens: Tokens[int], length: int, family: object = None, siblings: int = 1) -> None:
        assert 0 < len(tokens) <= length
        self.n_prompt = len(tokens)
        self.length = length  # cache slots that it may come to fill
        self.family = self if family is None else family  # of one prompt; they wait for the first one's prefill
        self.siblings = siblings  # how many they are
        self.submitted = time.perf_counter()
        # The scheduler's: its place in the queue.
        self.turn, self.order = 0.0, 0
        # The cache's, at admission and at its end: its slot in the batch, tokens that are in the cache.
        self.cache = CacheState()
        self.slot = -1
        self.computed = 0
        # The engine's: `computed` moves with each launch; whether a launch draws a token that is not known here yet, and in
        # which row; tokens that were cached when it began, that have run at most; when it began, when its last token came.
        self.drawn, self.row = 0, -1
        self.reused = self.furthest = 0
        self.started = self.last_token = 0.0
        # `accept`'s: its tokens, whether that was all, how it ended, a token that may have run but is no part of `tokens`.
        self.tokens = list(tokens)
        self.finished = False
        self.full = False  # its context is, and it goes on with fewer tokens
        self.outcome: FinishReason | None = None
        self.failure: QuarrelError | None = None
        self.stop_token: int | None = None

    @property
    def pending(self) -> int:
        """Tokens that have to run before anything new is known."""
        return len(self.tokens) + self.drawn - self.computed

    @property
    def keys(self) -> list[int]:
        """Its tokens as the prefix cache compares them."""
        return self.tokens if self.sight is None else self.sight.keyed(self.tokens)

    @property
    def place(self) -> tuple[float, int]:
        """Smaller goes first."""
        return self.turn, self.order

    def rows(self, end: int) -> int:
        """How many results are wanted of a launch of the tokens from `computed` to `end`: the last so many."""
        return int(end == len(self.tokens) + self.drawn)

    def chunk(self, most: int, alone: bool) -> int:
        """Tokens that a launch of `most` may run of it, 0 if it has to wait. alone: the launch is empty so far; what must
        run whole, a sequence or an image, then takes it for itself though it be longer."""
        if self.whole:
            return self.pending if alone or self.pending <= most else 0
        if self.sight is None:
            return min(self.pending, most)
        if alone:
            most = max(most, self.sight.least(self.computed))
        return self.sight.whole(self.computed, min(self.pending, most))

    def pieces(self, start: int, end: int) -> int:
        """Into how many launches these tokens could be split."""
        if self.whole:
            return 1
        return end - start if self.sight is None else self.sight.pieces(start, end)

    def on_preempt(self) -> None:  # noqa: B027 (most begin again with all of it)
        """Called when it is back in the queue: what has run, and was not accepted, will run again."""

    def shorten(self) -> None:  # noqa: B027 (most end where their context does)
        """Called when it is full and back in the queue: it goes on with fewer tokens, which run again."""

    def mask(self) -> Array | None:
        """Of the next token (`ops.adjust.packed`), where the device draws by a grammar; the tokens before are known."""
        return None

    def prepare(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Called while the step that draws its next token runs."""

    def ran(self, end: int) -> None:  # noqa: B027 (most tell nobody)
        """Called behind a step that ran tokens of it up to `end` and wanted no row."""

    def draft(self, room: int) -> Tokens[int]:
        """Up to `room` likely next tokens, to be verified in the step that draws the first of them."""
        return ()

    def ahead(self) -> int:
        """How many tokens a draft model shall propose, where `draft` had none."""
        return 0

    @abstractmethod
    def accept(self, outputs: StepOutputs, first: int, count: int, draft: Tokens[int]) -> int:
        """Takes rows `first` to `first + count` of a step, and says how many tokens of the draft were right; sets `over`
        when that was the last it needs."""

    @abstractmethod
    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        """Sends the caller its end, once its blocks are free. What `accept` concluded goes before `reason`."""


class Scoring(Sequence):
    """A text whose logits or hidden rows are wanted at every position."""

    every_row = True

    def __init__(self, tokens: Tokens[int], want: Want, deliver: Deliver, *, whole: bool = False, adapter: int = 0) -> None:
        super().__init__(tokens, len(tokens))
        self.want, self.whole, self.adapter = want, whole, adapter
        self._deliver = deliver
        self._delivered = 0

    def rows(self, end: int) -> int:
        # After a preemption some rows that were delivered run again.
        return max(0, end - max(self.computed, self._delivered))

    def accept(self, outputs: StepOutputs, first: int, count: int, draft: Tokens[int]) -> int:
        rows = outputs.logits if self.want == "logits" else outputs.hidden
        assert rows is not None
        self._deliver.rows(self._delivered, rows[first : first + count])
        self._delivered += count
        self.finished = self._delivered == len(self.tokens)
        return 0

    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        self._deliver.end(None if self.finished else failure or QuarrelError("the run was cancelled"))


class Deliver(ABC):
    """Where the rows of a `Scoring` go; called on the engine's thread, the arrays are the backend's: copy them."""

    @abstractmethod
    def rows(self, start: int, rows: Array) -> None: ...

    @abstractmethod
    def end(self, failure: QuarrelError | None) -> None: ...
