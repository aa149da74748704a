"""What sequences hold of the device's memory: blocks of keys and values, slots of recurrent state, what is known of old
texts. Plain ints; the step's `copy_blocks` and `copy_states` move what they stand for.

A sequence starts from the longest known beginning of its tokens: whole blocks are shared, of a last one that is known in
part it gets a copy, and recurrent layers go on from a copy of their state where one was kept. Copies are made at the end of
a prompt, at the end of a text, every `STRIDE` tokens of a long prompt, and before the last token of a prompt that several
continuations share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quarrel.engine.blocks import BlockPool
from quarrel.engine.prefix import Digest, Node, PrefixTree, common_prefix
from quarrel.engine.sequence import Sequence
from quarrel.engine.snapshots import Snapshots
from quarrel.ops.step import Limits

Copy = Callable[[list[tuple[int, int]]], None]
STRIDE = 512


@dataclass(frozen=True)
class CacheRules:
    """reuse: whether anything is kept. recurrent: whether there is state. window: keys further back than this are never
    read, in no layer; 0 is all. kept_blocks: how many may be kept that nobody uses, None is all there are."""

    reuse: bool = True
    recurrent: bool = False
    window: int = 0
    kept_blocks: int | None = None


DEFAULT_RULES = CacheRules()


@dataclass(frozen=True)
class _Found:
    """A known beginning: its blocks, the last one in use in part only if `known` ends within it."""

    known: int = 0
    blocks: tuple[int, ...] = ()
    nodes: tuple[Node, ...] = ()
    state: int | None = None


class Cache:
    """The books. `tables[slot]` are the blocks of the sequence in that slot, as a step wants them."""

    def __init__(
        self, limits: Limits, copy_blocks: Copy, copy_states: Copy, rules: CacheRules, digest: Digest | None = None
    ) -> None:
        self.limits, self.rules = limits, rules
        self.pool = BlockPool(limits.n_blocks)
        self.snapshots = Snapshots(limits.max_seqs, limits.states if rules.recurrent and rules.reuse else limits.max_seqs)
        self.prefixes = PrefixTree(self.pool, limits.block_size, self.snapshots, limit=rules.kept_blocks, digest=digest)
        self.tables: npt.NDArray[np.int32] = np.zeros((limits.max_seqs, limits.max_blocks_per_seq), np.int32)
        self._copy_blocks, self._copy_states = copy_blocks, copy_states
        self.hits = self.misses = 0  # tokens of prompts that were known, and that were not

    @property
    def available(self) -> int:
        """Blocks that are free or may be made so, at most."""
        return self.pool.free + self.prefixes.kept

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def start(self, s: Sequence, slot: int, family: Iterable[Sequence], spare: int) -> bool:
        """Gives it blocks for all its tokens, those of a known beginning shared. False if there are not enough, or if
        fewer than `spare` would be left."""
        size = self.limits.block_size
        found = self._find(s, family)
        whole, partial = found.blocks[: found.known // size], found.blocks[found.known // size :]
        needed = self.blocks_for(len(s.tokens)) - len(whole)
        # Held while others are evicted, so that what is to be shared or copied stays.
        self.prefixes.hold([*whole, *partial])
        enough = self.available >= needed + spare and self.prefixes.make_room(needed)
        if not enough and partial:  # the block to copy is one more than the sequence itself needs; run its tokens again
            self.prefixes.release(partial)
            found, partial = self._cut(found, len(whole) * size, aligned=True), ()
            whole, dropped = whole[: len(found.blocks)], whole[len(found.blocks) :]
            self.prefixes.release(dropped)
            needed = self.blocks_for(len(s.tokens)) - len(whole)
            enough = self.available >= needed + spare and self.prefixes.make_room(needed)
        if not enough:
            self.prefixes.release([*whole, *partial])
            return False
        fresh = self.pool.take(needed)
        if partial:
            self._copy_blocks([(partial[0], fresh[0])])
            self.prefixes.release(partial)
        if found.state is not None:
            self.snapshots.touch(found.state)
            self._copy_states([(found.state, slot)])
        s.blocks = [*whole, *fresh]
        s.slot, s.computed, s.marked = slot, found.known, found.known
        s.node = found.nodes[len(whole) - 1] if len(found.nodes) >= len(whole) > 0 else None
        s.indexed = len(whole) if s.node is not None or not whole else -1
        self.tables[slot, : len(s.blocks)] = s.blocks
        if s.keeps_prefix:
            self.hits, self.misses = self.hits + found.known, self.misses + len(s.tokens) - found.known
        return True

    def grow(self, s: Sequence, tokens: int) -> bool:
        """Gives it blocks for so many tokens in all; False if there are not enough."""
        if tokens <= len(s.blocks) * self.limits.block_size:
            return True
        missing = self.blocks_for(tokens) - len(s.blocks)
        if not self.prefixes.make_room(missing):
            return False
        at = len(s.blocks)
        s.blocks += self.pool.take(missing)
        self.tables[s.slot, at : len(s.blocks)] = s.blocks[at:]
        return True

    def cut(self, s: Sequence, end: int) -> int:
        """Where a launch that could run the tokens up to `end` should end, so that state is kept at a useful place."""
        if not self._snaps(s):
            return end
        last = s.given - 1
        if s.copies > 1 and s.computed < last < end:
            return last
        size = self.limits.block_size
        aligned = end - end % size
        return aligned if end < len(s.tokens) and aligned > s.computed else end

    def ran(self, s: Sequence) -> None:
        """Enters what is known of the tokens that have run, keeps its state where it will be wanted, and lets go of blocks
        behind the window. To be called behind each launch, before the next one."""
        at = s.computed
        if self.snapshots.size and self._snaps(s) and at <= max(s.given, len(s.tokens) - 1):
            shared = s.copies > 1 and at == s.given - 1
            if at == s.given or shared or (at - s.marked >= STRIDE and at % self.limits.block_size == 0):
                self._snap(s, s.snapshots, at)
                s.marked = at
        if at >= (s.indexed + 1) * self.limits.block_size:
            self._index(s)
        if self.rules.window:
            self._shed(s)

    def release(self, s: Sequence) -> None:
        """Takes all back; what a sequence that keeps its prefix has computed may be found by others from now on."""
        tokens = s.tokens
        if s.extra is not None and s.computed == len(tokens) + 1:
            tokens = [*tokens, s.extra]
        if self.rules.reuse and s.keeps_prefix and s.slot >= 0:
            self._keep(s, tokens)
        for slot in list(s.snapshots.values()):
            self.snapshots.drop(slot)
        self.prefixes.release(b for b in s.blocks if b >= 0)
        s.blocks, s.node, s.indexed, s.marked = [], None, 0, 0
        s.slot, s.computed = -1, 0

    def distrust(self, s: Sequence) -> None:
        """Forgets what it has computed, for others too: its numbers are wrong, or may be."""
        self.prefixes.forget(s.blocks)
        s.keeps_prefix = False

    def _snaps(self, s: Sequence) -> bool:
        return self.snapshots.size > 0 and s.keeps_prefix

    def _snap(self, s: Sequence, owner: dict[int, int], at: int) -> None:
        slot = self.snapshots.take(owner, at)
        if slot is not None:
            self._copy_states([(s.slot, slot)])

    def _find(self, s: Sequence, family: Iterable[Sequence]) -> _Found:
        """What is in the cache already. The last token always runs."""
        if not (self.rules.reuse and s.keeps_prefix):
            return _Found()
        last = len(s.tokens) - 1
        match = self.prefixes.match(s.tokens, last, s.salt)
        known, blocks = match.known, tuple(n.block for n in match.nodes)
        nodes: tuple[Node, ...] = match.nodes
        size = self.limits.block_size
        # What lies behind the known part of the last node is of another text.
        states = {i * size + at: slot for i, n in enumerate(nodes) for at, slot in n.snapshots.items()}
        states = {at: slot for at, slot in states.items() if at <= known}
        for other in family:
            # Another continuation of the same prompt: its last block is not in the tree yet.
            n = min(common_prefix(other.tokens[: other.computed], s.tokens), last)
            if n > known and -1 not in other.blocks[: self.blocks_for(n)]:
                known, blocks = n, tuple(other.blocks[: self.blocks_for(n)])
                nodes = match.nodes[: match.known // size]
                states |= other.snapshots
        return self._cut(_Found(known, blocks, nodes), known, states)

    def _cut(self, found: _Found, known: int, states: dict[int, int] | None = None, *, aligned: bool = False) -> _Found:
        """The beginning of what was found, no longer than `known`; with recurrent layers up to a kept state."""
        state = None
        if self.rules.recurrent:
            size = self.limits.block_size
            if states is None:
                states = {i * size + at: slot for i, n in enumerate(found.nodes) for at, slot in n.snapshots.items()}
            known = max((at for at in states if at <= known and not (aligned and at % size)), default=0)
            state = states.get(known)
        return _Found(known, found.blocks[: self.blocks_for(known)], found.nodes[: self.blocks_for(known)], state)

    def _index(self, s: Sequence) -> None:
        if not (self.rules.reuse and s.keeps_prefix):
            return
        size = self.limits.block_size
        while s.indexed >= 0 and (s.indexed + 1) * size <= min(s.computed, len(s.tokens)):
            i = s.indexed
            node = self.prefixes.insert(s.node, s.tokens[i * size : (i + 1) * size], s.blocks[i], s.salt)
            if node is None:
                s.indexed = -1  # what it stands on is gone, so the rest cannot be entered either
                return
            if node.block != s.blocks[i]:
                # Another has computed the same: one copy is enough, and what the node stands on is then held as well.
                self.prefixes.hold([node.block])
                self.prefixes.release([s.blocks[i]])
                s.blocks[i] = self.tables[s.slot, i] = node.block
            s.node, s.indexed = node, i + 1
            self._hand_over(s, node, i * size, size)

    def _keep(self, s: Sequence, tokens: list[int]) -> None:
        self._index(s)
        size, known = self.limits.block_size, min(s.computed, len(tokens))
        node, start = s.node, s.indexed * size
        if s.indexed < 0 or known <= 0:
            return
        for start in range(s.indexed * size, known, size):
            text = tokens[start : min(start + size, known)]
            node = self.prefixes.insert(
                s.node if start == s.indexed * size else node, text, s.blocks[start // size], s.salt
            )
            if node is None:
                return
            self._hand_over(s, node, start, len(text))
        if node is not None and node.alive and self._snaps(s) and s.computed == known:
            start = (known - 1) // size * size
            self._snap(s, node.snapshots, known - start)

    def _hand_over(self, s: Sequence, node: Node, start: int, count: int) -> None:
        for at in [at for at in s.snapshots if start < at <= start + count]:
            self.snapshots.move(s.snapshots, at, node.snapshots, at - start)

    def _shed(self, s: Sequence) -> None:
        # The next query stands at `computed`, or where a guess was wrong; older ones are launched before any other use.
        at = min(s.computed, len(s.tokens) + s.drawn)
        first = max(0, at + 1 - self.rules.window) // self.limits.block_size
        end = next((i for i in range(min(first, len(s.blocks)) - 1, -1, -1) if s.blocks[i] < 0), -1)
        gone = s.blocks[end + 1 : first]
        if gone and (s.indexed < 0 or s.indexed >= first or not s.keeps_prefix or not self.rules.reuse):
            self.prefixes.release(gone)
            s.blocks[end + 1 : first] = [-1] * len(gone)
            self.tables[s.slot, end + 1 : first] = 0
