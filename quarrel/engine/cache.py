"""What sequences hold of the device's memory: blocks of keys and values, slots of recurrent state, what is known of old
texts. Plain ints; the step's `copy_blocks` and `copy_states` move what they stand for.

A sequence starts from the longest known beginning of its tokens: whole blocks are shared, of a last one that is known in
part it gets a copy, and recurrent layers go on from a copy of their state where one was kept. Copies are made at the end of
a prompt, at the end of a text, every `STRIDE` tokens of a long prompt, and before the last token of a prompt that several
continuations share.

Groups of layers with a window (`ops/windows.py`) take their blocks from the same pool. A sequence gets them for what a
launch runs, and gives them back behind the window; it goes on from a known beginning only where they are still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quarrel.engine.blocks import BlockPool
from quarrel.engine.prefix import Digest, Node, PrefixTree, common_prefix
from quarrel.engine.sequence import Refusal, Sequence
from quarrel.engine.snapshots import Snapshots
from quarrel.ops.step import Limits

Copy = Callable[[list[tuple[int, int]]], None]
STRIDE = 512


@dataclass(frozen=True)
class CacheRules:
    """reuse: whether anything is kept. recurrent: whether there is state. window: keys further back than this are never
    read, in no layer, or where there are window_groups, in no layer of those; 0 is all. kept_blocks: how many may be kept
    that nobody uses, None is all there are."""

    reuse: bool = True
    recurrent: bool = False
    window: int = 0
    kept_blocks: int | None = None
    window_groups: int = 0


DEFAULT_RULES = CacheRules()


@dataclass(frozen=True)
class _Found:
    """A known beginning: its blocks, the last one in use in part only if `known` ends within it."""

    known: int = 0
    blocks: tuple[int, ...] = ()
    nodes: tuple[Node, ...] = ()
    state: int | None = None
    windows: tuple[tuple[int, ...], ...] = ()
    """As many as `blocks` where there are groups with a window."""


class Cache:
    """The books. `tables[slot]` are the blocks of the sequence in that slot, as a step wants them."""

    def __init__(
        self, limits: Limits, copy_blocks: Copy, copy_states: Copy, rules: CacheRules, digest: Digest | None = None
    ) -> None:
        self.limits, self.rules = limits, rules
        self.pool = BlockPool(limits.n_blocks)
        self.snapshots = Snapshots(limits.max_seqs, limits.states if rules.recurrent and rules.reuse else limits.max_seqs)
        self.prefixes = PrefixTree(self.pool, limits.block_size, self.snapshots, limit=rules.kept_blocks, digest=digest)
        shape = (1 + rules.window_groups, limits.max_seqs, limits.max_blocks_per_seq)
        self.every_table: npt.NDArray[np.int32] = np.zeros(shape, np.int32)
        self.tables, self.window_tables = self.every_table[0], self.every_table[1:]
        # Of the blocks of one group, the most that a token reads.
        self._span = (rules.window - 2) // limits.block_size + 2
        self._copy_blocks, self._copy_states = copy_blocks, copy_states
        self.hits = self.misses = 0  # tokens of prompts that were known, and that were not

    @property
    def available(self) -> int:
        """Blocks that are free or may be made so, at most."""
        return self.pool.free + self.prefixes.kept

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many has blocks enough when nothing else runs."""
        blocks = self.blocks_for(tokens)
        most = blocks + self.rules.window_groups * min(blocks, self._span)
        return blocks <= self.limits.max_blocks_per_seq and most <= self.limits.n_blocks

    def start(self, s: Sequence, slot: int, family: Iterable[Sequence], spare: int) -> bool:
        """Gives it blocks for all its tokens, those of a known beginning shared. False if there are not enough, or if
        fewer than `spare` would be left."""
        size, family = self.limits.block_size, list(family)
        room = self.available - spare * (1 + self.rules.window_groups)
        others = self.prefixes.lent, self.snapshots.taken
        if s.refused is not None and not family and s.refused.stands(room, others):
            return False
        found, end = self._find(s, family)
        needed = self._take_up(s, found, spare)
        if needed is None and found.known % size:
            # The block to copy is one more than the sequence itself needs; run its tokens again.
            found = self._cut(found, found.known - found.known % size, aligned=True)
            needed = self._take_up(s, found, spare)
        if needed is None:
            s.refused = None if end is None else Refusal(room, end, end.changes, others)
            return False
        s.refused = None
        count = found.known // size
        whole, partial = found.blocks[:count], found.blocks[count:]
        first = self._first(found.known)
        windows = [() if i < first else blocks for i, blocks in enumerate(found.windows[:count])]
        fresh = self.pool.take(needed)
        if partial:
            pairs = [(partial[0], fresh[0])]
            if self.rules.window_groups:
                copies = tuple(self.pool.take(self.rules.window_groups))
                pairs += zip(found.windows[count], copies)
                windows.append(copies)
            self._copy_blocks(pairs)
            self.prefixes.release([*partial, *(b for blocks in found.windows[count:] for b in blocks)])
        if found.state is not None:
            self.snapshots.touch(found.state)
            self._copy_states([(found.state, slot)])
        s.blocks, s.window_blocks = [*whole, *fresh], windows if self.rules.window_groups else []
        s.slot, s.computed, s.marked = slot, found.known, found.known
        s.node = found.nodes[len(whole) - 1] if len(found.nodes) >= len(whole) > 0 else None
        s.indexed = len(whole) if s.node is not None or not whole else -1
        self.tables[slot, : len(s.blocks)] = s.blocks
        if self.rules.window_groups:
            s.shed = first
            self._blank_windows(s, first)
            self._enter_windows(s, first)
        if s.keeps_prefix:
            self.hits, self.misses = self.hits + found.known, self.misses + len(s.tokens) - found.known
        return True

    def _take_up(self, s: Sequence, found: _Found, spare: int) -> int | None:
        """Holds what was found and makes room for the rest: how many blocks that is, those of windows aside. None, and
        nothing held, if there is not enough."""
        groups, total = self.rules.window_groups, self.blocks_for(len(s.tokens))
        count = found.known // self.limits.block_size
        needed, first = total - count, self._first(found.known)
        shared = found.windows[first:] if groups else ()
        # Held while others are evicted, so that what is to be shared or copied stays.
        held = [*found.blocks, *(b for blocks in shared for b in blocks)]
        self.prefixes.hold(held)
        copied = groups * (len(found.blocks) - count)
        # What its windows come to at most, of which some may be shared; more than that is taken as far as it is there.
        further = max(copied, groups * (min(total - first, self._span) - len(found.windows[first:count])))
        enough = self.available >= needed + further + spare * (1 + groups)
        if enough and self.prefixes.make_room(needed + copied):
            return needed
        self.prefixes.release(held)
        return None

    def grow(self, s: Sequence, tokens: int, end: int | None = None) -> bool:
        """Gives it blocks for so many tokens in all, and for windows up to `end`, by default as many; False if there are
        not enough."""
        groups, size = self.rules.window_groups, self.limits.block_size
        end = tokens if end is None else end
        if tokens <= len(s.blocks) * size and (not groups or end <= len(s.window_blocks) * size):
            return True
        missing = self.blocks_for(tokens) - len(s.blocks)
        ahead = self.blocks_for(end) - len(s.window_blocks) if groups else 0
        if not self.prefixes.make_room(max(missing, 0) + groups * max(ahead, 0)):
            return False
        if missing > 0:
            at = len(s.blocks)
            s.blocks += self.pool.take(missing)
            self.tables[s.slot, at : len(s.blocks)] = s.blocks[at:]
        if ahead > 0:
            self._widen(s, ahead)
        return True

    def reach(self, s: Sequence, end: int) -> int:
        """How far a launch can go, up to `end`, with the blocks for windows that there are; takes them."""
        groups = self.rules.window_groups
        if groups:
            ahead = min(self.blocks_for(end) - len(s.window_blocks), self.available // groups)
            if ahead > 0 and self.prefixes.make_room(groups * ahead):
                self._widen(s, ahead)
            end = min(end, len(s.window_blocks) * self.limits.block_size)
        return end

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
        if self.rules.window and at + 1 - self.rules.window >= (s.shed + 1) * self.limits.block_size:
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
        self.prefixes.release([*(b for b in s.blocks if b >= 0), *(b for blocks in s.window_blocks for b in blocks)])
        s.blocks, s.window_blocks, s.node, s.indexed, s.marked, s.shed = [], [], None, 0, 0, 0
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

    def _find(self, s: Sequence, family: Iterable[Sequence]) -> tuple[_Found, Node | None]:
        """What is in the cache already, and where in the tree that ends. The last token always runs."""
        if not (self.rules.reuse and s.keeps_prefix):
            return _Found(), None
        last = len(s.tokens) - 1
        match = self.prefixes.match(s.tokens, last, s.salt)
        known, blocks = match.known, tuple(n.block for n in match.nodes)
        windows = tuple(n.window_blocks for n in match.nodes)
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
                windows = tuple(other.window_blocks[: len(blocks)])
                nodes = match.nodes[: match.known // size]
                states |= other.snapshots
        return self._cut(_Found(known, blocks, nodes, windows=windows), known, states), match.end

    def _cut(self, found: _Found, known: int, states: dict[int, int] | None = None, *, aligned: bool = False) -> _Found:
        """The beginning of what was found, no longer than `known`; with recurrent layers up to a kept state, with groups of
        layers with a window up to where that is there."""
        state, size = None, self.limits.block_size
        if self.rules.recurrent:
            if states is None:
                states = {i * size + at: slot for i, n in enumerate(found.nodes) for at, slot in n.snapshots.items()}
            ends = sorted((at for at in states if at <= known and not (aligned and at % size)), reverse=True)
            known = self._windowed(found.windows, ends)
            state = states.get(known)
        elif self.rules.window_groups:
            known = self._windowed(found.windows, [known, *range(known - known % size, 0, -size)])
        count = self.blocks_for(known)
        return _Found(known, found.blocks[:count], found.nodes[:count], state, found.windows[:count])

    def _windowed(self, windows: tuple[tuple[int, ...], ...], ends: Iterable[int]) -> int:
        """The first of these ends from where a sequence can go on, or 0."""
        if not self.rules.window_groups:
            return next(iter(ends), 0)
        since: list[int] = []  # from which block on there are all, up to each
        for i, blocks in enumerate(windows):
            since.append(i + 1 if not blocks else since[-1] if since else 0)
        return next((at for at in ends if at and since[self.blocks_for(at) - 1] <= self._first(at)), 0)

    def _first(self, at: int) -> int:
        """The first block that is read from position `at` on, by those with a window."""
        return max(0, at + 1 - self.rules.window) // self.limits.block_size

    def _widen(self, s: Sequence, blocks: int) -> None:
        at = len(s.window_blocks)
        taken = iter(self.pool.take(self.rules.window_groups * blocks))
        s.window_blocks += zip(*[taken] * self.rules.window_groups)
        self._enter_windows(s, at)

    def _enter_windows(self, s: Sequence, at: int) -> None:
        if len(s.window_blocks) > at:
            self.window_tables[:, s.slot, at : len(s.window_blocks)] = np.array(s.window_blocks[at:], np.int32).T

    def _index(self, s: Sequence) -> None:
        if not (self.rules.reuse and s.keeps_prefix):
            return
        size = self.limits.block_size
        while s.indexed >= 0 and (s.indexed + 1) * size <= min(s.computed, len(s.tokens)):
            i = s.indexed
            text, windows = s.tokens[i * size : (i + 1) * size], self._windows_at(s, i)
            node = self.prefixes.insert(s.node, text, s.blocks[i], s.salt, windows)
            if node is None:
                s.indexed = -1  # what it stands on is gone, so the rest cannot be entered either
                return
            if node.block != s.blocks[i]:
                # Another has computed the same: one copy is enough, and what the node stands on is then held as well.
                self.prefixes.hold([node.block])
                self.prefixes.release([s.blocks[i]])
                s.blocks[i] = self.tables[s.slot, i] = node.block
            if windows and node.window_blocks and node.window_blocks != windows:
                self.prefixes.hold(node.window_blocks)
                self.prefixes.release(windows)
                s.window_blocks[i] = node.window_blocks
                self.window_tables[:, s.slot, i] = node.window_blocks
            s.node, s.indexed = node, i + 1
            self._hand_over(s, node, i * size, size)

    def _keep(self, s: Sequence, tokens: list[int]) -> None:
        self._index(s)
        size, known = self.limits.block_size, min(s.computed, len(tokens))
        node, start = s.node, s.indexed * size
        if s.indexed < 0 or known <= 0:
            return
        for start in range(s.indexed * size, known, size):
            i, text = start // size, tokens[start : min(start + size, known)]
            before = s.node if i == s.indexed else node
            node = self.prefixes.insert(before, text, s.blocks[i], s.salt, self._windows_at(s, i))
            if node is None:
                return
            self._hand_over(s, node, start, len(text))
        if node is not None and node.alive and self._snaps(s) and s.computed == known:
            start = (known - 1) // size * size
            self._snap(s, node.snapshots, known - start)

    def _hand_over(self, s: Sequence, node: Node, start: int, count: int) -> None:
        for at in [at for at in s.snapshots if start < at <= start + count]:
            self.snapshots.move(s.snapshots, at, node.snapshots, at - start)

    def _windows_at(self, s: Sequence, i: int) -> tuple[int, ...]:
        return s.window_blocks[i] if i < len(s.window_blocks) else ()

    def _shed(self, s: Sequence) -> None:
        # The next query stands at `computed`, or where a guess was wrong; older ones are launched before any other use.
        first = self._first(min(s.computed, len(s.tokens) + s.drawn))
        if first <= s.shed or (0 <= s.indexed < first and s.keeps_prefix and self.rules.reuse):
            return
        if self.rules.window_groups:
            for i in range(s.shed, first):
                self.prefixes.release(s.window_blocks[i])
                s.window_blocks[i] = ()
            self._blank_windows(s, first)
        else:
            self.prefixes.release(s.blocks[s.shed : first])
            s.blocks[s.shed : first] = [-1] * (first - s.shed)
            self.tables[s.slot, :first] = s.blocks[first] if first < len(s.blocks) else 0
        s.shed = first

    def _blank_windows(self, s: Sequence, first: int) -> None:
        # A kernel may load the rest of a tile in front of the window, to weigh it with nothing: rows of the sequence's own,
        # which are numbers if anything of it is.
        live = s.window_blocks[first] if first < len(s.window_blocks) else (0,) * self.rules.window_groups
        self.window_tables[:, s.slot, :first] = np.array(live, np.int32)[:, None]
