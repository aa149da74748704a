"""Which sequences run in the next step: in order of turns; prompts in chunks, next to the sequences that decode.

    turn     the time of arrival, plus `PATIENCE` for each rank: interactive requests (rank 0) go before a batch (rank 1),
             unless that has waited for so much longer; so nobody waits for ever
    admit    when there are blocks for all its tokens so far, and a few more for those that run; the first in the queue is
             never passed over for want of blocks
    preempt  when a running sequence finds no block for its next token, the one of the last turn goes back to the queue; so
             does one of a higher rank for one that waits. It starts again later, from what the cache still has of it
    beside   tokens of prompts that a step takes at most where others decode, who wait for all of it; as many as fit by
             default, which gives the most tokens a second

A step serves one kind of result: tokens drawn, or rows of every position; the kinds take turns.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from quarrel.engine.cache import Cache
from quarrel.engine.queue import WaitingQueue
from quarrel.engine.sequence import Sequence
from quarrel.engine.service import MAX_DRAFT
from quarrel.ops.step import Limits, Want

Propose = Callable[[Mapping[Sequence, int]], Mapping[Sequence, tuple[int, ...]]]
"""A draft model's tokens for each sequence, up to so many."""
PATIENCE = 10.0
"""Seconds by which one rank goes before the next."""


@dataclass(slots=True)
class Part:
    """`count` tokens of a sequence from `start` on, the draft at their end; `rows` of them, the last ones, are wanted."""

    sequence: Sequence
    start: int
    count: int
    rows: int
    draft: tuple[int, ...] = ()
    drafted: bool = False
    """Whether a draft model made it."""


@dataclass(frozen=True)
class Batch:
    """One step's work."""

    want: Want
    parts: tuple[Part, ...]
    waits: bool = False
    """Whether the next step cannot be made before its results are known."""


DRAIN = Batch("tokens", ())
"""A sequence has to be preempted, but a step is in flight: call again when its results are known."""


class Scheduler:
    """The queue, the running sequences, and each step's share of them. max_rows: of one step. beside: tokens of prompts in
    a step with sequences that decode; texts that run whole and images are not cut."""

    def __init__(
        self,
        limits: Limits,
        cache: Cache,
        *,
        max_rows: int,
        clock: Callable[[], float] = time.perf_counter,
        propose: Propose = lambda wanted: {},
        beside: int | None = None,
    ) -> None:
        assert limits.max_tokens >= limits.max_seqs, "a step must hold a token of each running sequence"
        self.limits, self.cache, self.clock = limits, cache, clock
        self._propose = propose
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in order of turns
        self.max_tokens = limits.max_tokens
        self._beside = limits.max_tokens if beside is None else beside
        self.preempted = 0
        self._max_rows = max(max_rows, limits.max_seqs)
        self._slots = list(range(limits.max_seqs - 1, -1, -1))
        self._last_kind = ""
        self._count = 0

    def add(self, sequence: Sequence) -> None:
        """Queues it. Alone, it must fit the cache, and a step if it must run whole."""
        assert self.cache.fits(sequence.length)
        assert not sequence.whole or (sequence.length <= self.limits.max_tokens and not self.cache.rules.window_groups)
        self._count += 1
        sequence.turn, sequence.order = self.clock() + PATIENCE * sequence.rank, self._count
        self.waiting.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes it out of the queue or the batch and frees its blocks; the prefix cache may keep them."""
        self.waiting.remove(sequence)
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._slots.append(sequence.slot)
            self.cache.free(sequence)

    def next(self, *, drained: bool = True) -> Batch | None:
        """The next step's work, None if there is none, or `DRAIN`. drained: no step is in flight."""
        if not self._admit(drained):
            return DRAIN
        ready = [s for s in self.running if _ready(s)]
        if not ready:
            return None
        kind = self._next_kind(ready)
        mine = [s for s in ready if _kind(s) == kind]
        for sequence in mine:
            end = sequence.computed + 1
            while sequence.slot >= 0 and not self.cache.append(sequence, len(sequence.tokens) + sequence.drawn, end):
                if not drained:
                    return DRAIN
                self.preempt(self.running[-1])
        return self._batch([s for s in mine if s.slot >= 0])

    def preempt(self, sequence: Sequence) -> None:
        """Frees its blocks and queues it again; it keeps its turn. No step with it may be in flight."""
        assert not sequence.drawn
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        self.cache.free(sequence)
        sequence.on_preempt()
        self.waiting.push(sequence)
        self.preempted += 1

    def _batch(self, mine: list[Sequence]) -> Batch | None:
        tokens, rows = self.max_tokens, self._max_rows
        decoding: list[Sequence] = []
        others: list[Sequence] = []
        for s in mine:
            (decoding if self._decodes(s) else others).append(s)
        parts: list[Part] = []
        left = sum(s.pending for s in decoding)
        drafts, drafted = self._drafts(decoding, min(tokens, rows) - left)
        for sequence in decoding:
            count = min(sequence.pending, tokens)
            left -= sequence.pending
            if not tokens:
                break
            if sequence not in drafts or count < sequence.pending:
                parts.append(Part(sequence, sequence.computed, count, int(count == sequence.pending)))
                tokens, rows = tokens - count, rows - 1
                continue
            draft = drafts[sequence][: max(0, min(tokens - count, rows - 1) - left)]
            # Nobody loses a block to a draft.
            if draft and not self.cache.append(sequence, len(sequence.tokens) + len(draft)):
                draft = ()
            count += len(draft)
            parts.append(Part(sequence, sequence.computed, count, 1 + len(draft), draft, sequence in drafted))
            tokens, rows = tokens - count, rows - 1 - len(draft)
        # Those that must run whole keep their order, so that each comes first, and fits, after a while.
        beside = self._beside if parts else tokens
        for sequence in others:
            most = tokens if sequence.whole or not sequence.every_row else min(tokens, rows)
            if not sequence.whole and sequence.sight is None:
                most = min(most, beside)
            count = sequence.chunk(most, not parts)
            if count <= 0:
                continue
            end = self.cache.append_windows(sequence, sequence.computed + count)
            count = self.cache.snapshot_end(sequence, end) - sequence.computed
            if sequence.sight is not None and (count := sequence.sight.whole(sequence.computed, count)) == 0:
                continue
            wanted = sequence.rows(sequence.computed + count)
            if wanted > rows and not sequence.whole:
                continue
            parts.append(Part(sequence, sequence.computed, count, wanted))
            tokens, rows, beside = tokens - count, rows - wanted, max(0, beside - count)
        if not parts:
            return None
        want = _want({p.sequence.want for p in parts if p.rows}, parts)
        waits = want not in _DRAWN or any(p.sequence.waits and p.rows for p in parts)
        return Batch(want, tuple(parts), waits)

    def _decodes(self, s: Sequence) -> bool:
        """Whether it runs one token, or those once more that were right in a draft with a wrong one."""
        if s.whole or s.every_row:
            return False
        return s.pending == 1 or (self.cache.rules.rollback and s.n_prompt <= s.computed and s.pending <= MAX_DRAFT + 1)

    def _drafts(
        self, decoding: list[Sequence], spare: int
    ) -> tuple[Mapping[Sequence, tuple[int, ...]], Mapping[Sequence, tuple[int, ...]]]:
        """Drafts by sequence, of up to `spare` tokens each, and those of them that a draft model proposed."""
        found: dict[Sequence, tuple[int, ...]] = {}
        wanted: dict[Sequence, int] = {}
        for sequence in decoding:
            # A draft continues the last token, so that has to be known.
            if not sequence.waits or sequence.drawn or not self.cache.rules.drafts:
                continue
            room = min(spare, sequence.length - len(sequence.tokens))
            if room <= 0:
                continue
            if draft := tuple(sequence.draft(room)):
                found[sequence] = draft
            elif ahead := min(room, sequence.ahead()):
                wanted[sequence] = ahead
        drafted = self._propose(wanted) if wanted else {}
        return {**found, **drafted}, drafted

    def _next_kind(self, ready: list[Sequence]) -> str:
        """The kind of result after the last one served, among those that these are ready for."""
        kinds = sorted({_kind(s) for s in ready})
        self._last_kind = next((k for k in kinds if k > self._last_kind), kinds[0])
        return self._last_kind

    def _admit(self, drained: bool) -> bool:
        """Admits whom it can; False if one must be preempted first, and cannot be before the step in flight is over."""
        passed: list[Sequence] = []  # over, to be queued again
        possible = True
        while self.waiting:
            sequence = self.waiting.pop()
            assert sequence is not None
            family = [s for s in self.running if s.family is sequence.family] if sequence.siblings > 1 else []
            if self.cache.rules.reuse and any(s.pending > 1 for s in family):
                passed.append(sequence)  # another one computes its prompt right now
                continue
            if self._slots and self.cache.allocate(sequence, self._slots[-1], family, len(self.running)):
                self._slots.pop()
                insort(self.running, sequence, key=_place)
                continue
            passed.append(sequence)
            last = self.running[-1] if self.running else None
            if last is None or last.rank <= sequence.rank or last.place < sequence.place:
                break
            if not drained:
                possible = False
                break
            self.preempt(last)
            self.waiting.push(passed.pop())
        for sequence in passed:
            self.waiting.push(sequence)
        return possible


_place = attrgetter("turn", "order")
_DRAWN = ("tokens", "logprobs")
"""The device draws these, so the next step need not wait."""


def _kind(sequence: Sequence) -> str:
    return sequence.want if sequence.every_row else "drawn"


def _ready(sequence: Sequence) -> bool:
    """Whether it has a token to run, and is not about to end."""
    return sequence.computed < sequence.length and sequence.computed < len(sequence.tokens) + sequence.drawn


def _want(wants: set[Want], parts: list[Part]) -> Want:
    if len(wants) == 1:
        return wants.pop()
    if wants:
        logprobs = "logprobs" in wants
        return ("all" if logprobs else "both") if "logits" in wants else "logprobs"
    # No row is wanted: the cheapest that every model has.
    first = parts[0].sequence
    return first.want if first.every_row else "tokens"
