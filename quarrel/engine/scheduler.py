"""Who runs in the next step: first come, first served; prompts in pieces, next to the sequences that decode.

A sequence is let in when all the blocks that it may come to need are free, so whatever runs can finish. The first in the
queue is never passed over for want of blocks. A step serves one kind of result (`want`); the kinds take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quarrel.engine.blocks import BlockPool
from quarrel.engine.prefix import Kept, PrefixStore, common_prefix
from quarrel.engine.sequence import Sequence
from quarrel.ops.step import Limits, Want

CopyBlocks = Callable[[list[tuple[int, int]]], None]


@dataclass(frozen=True)
class Part:
    """`count` tokens of a sequence from `start` on; `rows` of them, the last ones, are wanted."""

    sequence: Sequence
    start: int
    count: int
    rows: int


@dataclass(frozen=True)
class Batch:
    """One step's work."""

    want: Want
    parts: tuple[Part, ...]


class Scheduler:
    """Queues, blocks and turns. `copy_blocks` is the step's; `max_rows` bounds the rows that one step returns of what can
    be cut."""

    def __init__(self, limits: Limits, copy_blocks: CopyBlocks, *, max_rows: int, reuse: bool = True) -> None:
        assert limits.max_tokens >= limits.max_seqs, "a step must hold a token of each running sequence"
        self.limits = limits
        self.pool = BlockPool(limits.n_blocks)
        self.prefixes = PrefixStore(self.pool, limits.block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._copy_blocks, self._max_rows, self._reuse = copy_blocks, max(max_rows, limits.max_seqs), reuse
        self._slots = list(range(limits.max_seqs - 1, -1, -1))
        self._last_want: Want | None = None

    def add(self, sequence: Sequence) -> None:
        """Queues it. It must fit the cache, and a step if it runs whole, when nothing else runs."""
        assert self._blocks_for(sequence.length) <= min(self.limits.max_blocks_per_seq, self.limits.n_blocks)
        assert not sequence.whole or sequence.length <= self.limits.max_tokens
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes it out, wherever it is, and its blocks back; a finished one's may be kept for reuse."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
            self._slots.append(sequence.slot)
        used = self._blocks_for(sequence.computed)
        if self._reuse and sequence.keeps_prefix and sequence.computed:
            self.prefixes.keep(sequence.tokens[: sequence.computed], sequence.blocks[:used])
            self.pool.give_back(sequence.blocks[used:])
        else:
            self.pool.give_back(sequence.blocks)
        sequence.blocks = []

    def next(self) -> Batch | None:
        """The next step's work, or None if there is none."""
        self._admit()
        want = self._turn()
        if want is None:
            return None
        tokens, rows = self.limits.max_tokens, self._max_rows
        parts = []
        mine = [s for s in self.running if s.want == want]
        # Those that decode come first: they are at most max_seqs tokens, and somebody is reading them.
        # Those that run whole keep their order, so that each is the first, and fits, after a while.
        for sequence in sorted(mine, key=lambda s: s.pending > 1 and not s.whole):
            most = tokens if sequence.whole or not sequence.every_row else min(tokens, rows)
            count = sequence.pending if sequence.whole else min(sequence.pending, most)
            if not 0 < count <= most:
                continue
            asked = count if sequence.every_row else int(count == sequence.pending)
            if asked > rows and not sequence.whole:
                continue
            parts.append(Part(sequence, sequence.computed, count, asked))
            tokens, rows = tokens - count, rows - asked
        return Batch(want, tuple(parts))

    def _turn(self) -> Want | None:
        """The kind of result after the last one served, among those that a running sequence wants."""
        wants: list[Want] = sorted({s.want for s in self.running})
        if not wants:
            return None
        later = [w for w in wants if self._last_want is not None and w > self._last_want]
        self._last_want = (later or wants)[0]
        return self._last_want

    def _admit(self) -> None:
        held: list[Sequence] = []
        while self.waiting and len(self.running) < self.limits.max_seqs:
            sequence = self.waiting.popleft()
            if self._reuse and any(s.family is sequence.family and s.pending > 1 for s in self.running):
                held.append(sequence)  # its prompt is being computed by another one right now
            elif self._start(sequence):
                sequence.slot = self._slots.pop()
                self.running.append(sequence)
            else:
                held.append(sequence)
                break
        self.waiting.extendleft(reversed(held))

    def _start(self, sequence: Sequence) -> bool:
        """Gives it blocks: the whole ones of the longest known prefix, shared; a copy of the last, half-used one; free ones
        for what is to come. False if there are not enough."""
        size = self.limits.block_size
        known, blocks = self._longest_prefix(sequence)
        shared, partial = blocks[: known // size], blocks[known // size : self._blocks_for(known)]
        needed = self._blocks_for(sequence.length) - len(shared)
        # Held while others are evicted, so that what is to be shared or copied stays.
        self.pool.share([*shared, *partial])
        enough = self.prefixes.make_room(needed)
        if not enough and partial:  # the block to copy is one more than the sequence itself needs; run its tokens again
            self.pool.give_back(partial)
            known, partial = len(shared) * size, []
            enough = self.prefixes.make_room(needed)
        if not enough:
            self.pool.give_back(shared)
            return False
        fresh = self.pool.take(needed)
        if partial:
            self._copy_blocks([(partial[0], fresh[0])])
            self.pool.give_back(partial)
        sequence.blocks = [*shared, *fresh]
        sequence.computed = sequence.reused = known
        return True

    def _longest_prefix(self, sequence: Sequence) -> tuple[int, list[int]]:
        """Tokens that are in the cache already, and the blocks that hold them. The last token always runs."""
        if not (self._reuse and sequence.keeps_prefix):
            return 0, []
        wanted = sequence.tokens[:-1]
        best, blocks = 0, []
        used: Kept | None = None
        for entry in self.prefixes.entries():
            if (n := common_prefix(entry.tokens, wanted)) > best:
                best, blocks, used = n, list(entry.blocks), entry
        for other in self.running:
            if other.keeps_prefix and (n := common_prefix(other.tokens[: other.computed], wanted)) > best:
                best, blocks, used = n, other.blocks, None
        if used is not None:
            self.prefixes.touch(used)
        return best, blocks

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)
