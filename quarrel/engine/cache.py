"""What sequences have of the device's memory: blocks of keys and values, slots of recurrent state, and the prefix cache.
Plain ints; the step's `copy_blocks` and `copy_states` move what they stand for.

A sequence starts from the longest prefix of its tokens in the cache: it shares whole blocks, gets a copy of a last one that
matches in part, and recurrent layers start from a snapshot of their state. Snapshots are taken at the end of a prompt, at
the end of a text, every `STRIDE` tokens of a long prompt, and before the last token of a prompt that several continuations
share.

Window groups (`ops/windows.py`) take their blocks from the same pool. A sequence gets them for what a launch runs, and
frees them behind the window; it starts from a cached prefix only where those are still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quarrel.engine.pools import BlockPool, Snapshots
from quarrel.engine.prefix import Digest, Node, PrefixTree, common_prefix
from quarrel.engine.sequence import CacheState, Refusal, Sequence
from quarrel.ops.step import Limits

Copy = Callable[[list[tuple[int, int]]], None]
STRIDE = 512


@dataclass(frozen=True)
class CacheRules:
    """reuse: whether anything is kept. recurrent: whether there is state. window: keys further back than this are never
    read, in no layer, or where there are window_groups, in no layer of those; 0 is all. kept_blocks: how many may be kept
    that nobody uses, None is all there are. rollback: a sequence's state slot has another, `max_seqs` behind it, for the
    state in front of a draft."""

    reuse: bool = True
    recurrent: bool = False
    window: int = 0
    kept_blocks: int | None = None
    window_groups: int = 0
    rollback: bool = False

    @property
    def drafts(self) -> bool:
        """Whether a sequence can be taken back to where a draft was wrong."""
        return self.rollback or not self.recurrent


DEFAULT_RULES = CacheRules()


@dataclass(frozen=True)
class Found:
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
        used = limits.max_seqs * (2 if rules.rollback else 1)
        self.snapshots = Snapshots(used, limits.states if rules.recurrent and rules.reuse else used)
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

    def allocate(self, s: Sequence, slot: int, family: Iterable[Sequence], spare: int) -> bool:
        """Gives it blocks for all its tokens, those of a cached prefix shared. False if there are not enough, or if fewer
        than `spare` would be left."""
        size, family = self.limits.block_size, list(family)
        room = self.available - spare * (1 + self.rules.window_groups)
        others = self.prefixes.window_changes, self.snapshots.added
        if s.cache.refusal is not None and not family and s.cache.refusal.stands(room, others):
            return False
        found, end = self._find(s, family)
        needed = self._reserve(s, found, spare)
        while self._lost(found):
            found, end = self._find(s, family)
            needed = self._reserve(s, found, spare)
        if needed is None and found.known % size:
            # The block to copy is one more than the sequence itself needs; run its tokens again.
            found = self._cut(found, found.known - found.known % size, aligned=True)
            needed = self._reserve(s, found, spare)
        if needed is None:
            s.cache.refusal = None if end is None or self._lost(found) else Refusal(room, end, end.changes, others)
            return False
        count = found.known // size
        whole, partial = found.blocks[:count], found.blocks[count:]
        first = self.first(found.known)
        windows = [() if i < first else blocks for i, blocks in enumerate(found.windows[:count])]
        fresh = self.pool.allocate(needed)
        if partial:
            pairs = [(partial[0], fresh[0])]
            if self.rules.window_groups:
                copies = tuple(self.pool.allocate(self.rules.window_groups))
                pairs += zip(found.windows[count], copies)
                windows.append(copies)
            self._copy_blocks(pairs)
            self.prefixes.release([*partial, *(b for blocks in found.windows[count:] for b in blocks)])
        if found.state is not None:
            self.snapshots.touch(found.state)
            self._copy_states([(found.state, slot)])
        s.cache.blocks, s.cache.window_blocks = [*whole, *fresh], windows if self.rules.window_groups else []
        s.slot, s.computed, s.cache.snapshot_at = slot, found.known, found.known
        s.cache.found = found.known
        s.cache.node = found.nodes[len(whole) - 1] if len(found.nodes) >= len(whole) > 0 else None
        s.cache.indexed = len(whole) if s.cache.node is not None or not whole else -1
        self.tables[slot, : len(s.cache.blocks)] = s.cache.blocks
        if self.rules.window_groups:
            s.cache.freed = first
            self._blank_windows(s, first)
            self._write_windows(s, first)
        if s.keeps_prefix:
            self.hits, self.misses = self.hits + found.known, self.misses + len(s.tokens) - found.known
        return True

    def _reserve(self, s: Sequence, found: Found, spare: int) -> int | None:
        """Holds what was found and makes room for the rest: how many blocks that is, those of windows aside. None, and
        nothing retained, if there is not enough."""
        groups, total = self.rules.window_groups, self.blocks_for(len(s.tokens))
        count = found.known // self.limits.block_size
        needed, first = total - count, self.first(found.known)
        shared = found.windows[first:] if groups else ()
        # Retained while others are evicted, so that what will be shared or copied stays.
        found_blocks = [*found.blocks, *(b for blocks in shared for b in blocks)]
        self.prefixes.retain(found_blocks)
        copied = groups * (len(found.blocks) - count)
        # What its windows come to at most, of which some may be shared; more than that is taken as far as it is there.
        further = max(copied, groups * (min(total - first, self._span) - len(found.windows[first:count])))
        enough = self.available >= needed + further + spare * (1 + groups)
        if enough and self.prefixes.make_room(needed + copied) and not self._lost(found):
            return needed
        self.prefixes.release(found_blocks)
        return None

    def _lost(self, found: Found) -> bool:
        """Whether making room took the state that was found: it may be a node's whose blocks another sequence's stand for,
        and those alone are retained."""
        return found.state is not None and found.state not in self.snapshots

    def append(self, s: Sequence, tokens: int, end: int | None = None) -> bool:
        """Gives it blocks for so many tokens in all, and for windows up to `end`, by default as many; False if there are
        not enough."""
        state = s.cache
        groups, size = self.rules.window_groups, self.limits.block_size
        end = tokens if end is None else end
        if tokens <= len(state.blocks) * size and (not groups or end <= len(state.window_blocks) * size):
            return True
        missing = self.blocks_for(tokens) - len(state.blocks)
        ahead = self.blocks_for(end) - len(state.window_blocks) if groups else 0
        if not self.prefixes.make_room(max(missing, 0) + groups * max(ahead, 0)):
            return False
        if missing > 0:
            at = len(state.blocks)
            state.blocks += self.pool.allocate(missing)
            self.tables[s.slot, at : len(state.blocks)] = state.blocks[at:]
        if ahead > 0:
            self._add_windows(s, ahead)
        return True

    def append_windows(self, s: Sequence, end: int) -> int:
        """How far a launch can go, up to `end`, with the blocks for windows that there are; takes them."""
        groups = self.rules.window_groups
        if groups:
            ahead = min(self.blocks_for(end) - len(s.cache.window_blocks), self.available // groups)
            if ahead > 0 and self.prefixes.make_room(groups * ahead):
                self._add_windows(s, ahead)
            end = min(end, len(s.cache.window_blocks) * self.limits.block_size)
        return end

    def snapshot_end(self, s: Sequence, end: int) -> int:
        """Where a launch that could run the tokens up to `end` should end, so that state is kept at a useful place."""
        if not self._snaps(s):
            return end
        last = s.n_prompt - 1
        if s.siblings > 1 and s.computed < last < end:
            return last
        size = self.limits.block_size
        aligned = end - end % size
        return aligned if end < len(s.tokens) and aligned > s.computed else end

    def commit(self, s: Sequence) -> None:
        """Adds the blocks that a launch has filled to the prefix tree, takes a snapshot of the state where one will be
        useful, and frees blocks behind the window. Called after each launch, before the next one."""
        state = s.cache
        at = s.computed
        if self.snapshots.size and self._snaps(s) and at <= max(s.n_prompt, len(s.tokens) - 1):
            shared = s.siblings > 1 and at == s.n_prompt - 1
            if at == s.n_prompt or shared or (at - state.snapshot_at >= STRIDE and at % self.limits.block_size == 0):
                self._snap(s, state.snapshots, at)
                state.snapshot_at = at
        if at >= (state.indexed + 1) * self.limits.block_size:
            self._index(s)
        if self.rules.window and at + 1 - self.rules.window >= (state.freed + 1) * self.limits.block_size:
            self._free_behind_window(s)

    def guard(self, sequences: list[Sequence]) -> None:
        """Keeps the states of these, whose next launch runs a draft."""
        if self.rules.rollback and sequences:
            self._copy_states([(s.slot, s.slot + self.limits.max_seqs) for s in sequences])

    def roll_back(self, s: Sequence, start: int) -> bool:
        """Takes its state back to where a launch of a wrong draft began; False if there is none, and what was right stays
        run."""
        if self.rules.rollback:
            self._copy_states([(s.slot + self.limits.max_seqs, s.slot)])
            s.computed = start
        return self.rules.rollback

    def free(self, s: Sequence) -> None:
        """Frees all that it has; what a sequence that keeps its prefix has computed may be found by others from now on."""
        tokens = s.keys
        if s.stop_token is not None and s.computed == len(tokens) + 1:
            tokens = [*tokens, s.stop_token]
        if self.rules.reuse and s.keeps_prefix and s.slot >= 0:
            self._keep(s, tokens)
        state, s.cache = s.cache, CacheState()
        for slot in list(state.snapshots.values()):
            self.snapshots.drop(slot)
        self.prefixes.release(
            [*(b for b in state.blocks if b >= 0), *(b for blocks in state.window_blocks for b in blocks)]
        )
        s.slot, s.computed = -1, 0

    def invalidate(self, s: Sequence) -> None:
        """Forgets what it has computed, for others too: its numbers are wrong, or may be."""
        self.prefixes.forget(s.cache.blocks)
        s.keeps_prefix = False

    def known(self, tokens: list[int], salt: bytes) -> Found:
        """The longest beginning of a text that is in the cache, from where a sequence could go on."""
        match = self.prefixes.match(tokens, len(tokens), salt)
        blocks, windows = tuple(n.block for n in match.nodes), tuple(n.window_blocks for n in match.nodes)
        return self._cut(Found(match.known, blocks, match.nodes, windows=windows), match.known)

    def _snaps(self, s: Sequence) -> bool:
        return self.snapshots.size > 0 and s.keeps_prefix

    def _snap(self, s: Sequence, owner: dict[int, int], at: int) -> None:
        slot = self.snapshots.add(owner, at)
        if slot is not None:
            self._copy_states([(s.slot, slot)])

    def _find(self, s: Sequence, family: Iterable[Sequence]) -> tuple[Found, Node | None]:
        """What is in the cache already, and where in the tree that ends. The last token always runs."""
        if not (self.rules.reuse and s.keeps_prefix):
            return Found(), None
        last = len(s.tokens) - 1
        match = self.prefixes.match(keys := s.keys, last, s.salt)
        known, blocks = match.known, tuple(n.block for n in match.nodes)
        windows = tuple(n.window_blocks for n in match.nodes)
        nodes: tuple[Node, ...] = match.nodes
        size = self.limits.block_size
        # What lies behind the known part of the last node is of another text.
        states = {i * size + at: slot for i, n in enumerate(nodes) for at, slot in n.snapshots.items()}
        states = {at: slot for at, slot in states.items() if at <= known}
        for other in family:
            # Another continuation of the same prompt: its last block is not in the tree yet.
            n = min(common_prefix(other.keys[: other.computed], keys), last)
            if n > known and -1 not in other.cache.blocks[: self.blocks_for(n)]:
                known, blocks = n, tuple(other.cache.blocks[: self.blocks_for(n)])
                windows = tuple(other.cache.window_blocks[: len(blocks)])
                nodes = match.nodes[: match.known // size]
                states |= other.cache.snapshots
        return self._cut(Found(known, blocks, nodes, windows=windows), known, states), match.end

    def _cut(self, found: Found, known: int, states: dict[int, int] | None = None, *, aligned: bool = False) -> Found:
        """The beginning of what was found, no longer than `known`; with recurrent layers up to a kept state, with groups of
        layers with a window up to where that is there."""
        state, size = None, self.limits.block_size
        if self.rules.recurrent:
            if states is None:
                states = {i * size + at: slot for i, n in enumerate(found.nodes) for at, slot in n.snapshots.items()}
            ends = sorted((at for at in states if at <= known and not (aligned and at % size)), reverse=True)
            known = self._usable(found.windows, ends)
            state = states.get(known)
        elif self.rules.window_groups:
            known = self._usable(found.windows, [known, *range(known - known % size, 0, -size)])
        count = self.blocks_for(known)
        return Found(known, found.blocks[:count], found.nodes[:count], state, found.windows[:count])

    def _usable(self, windows: tuple[tuple[int, ...], ...], ends: Iterable[int]) -> int:
        """The first of these ends from where a sequence can go on, or 0."""
        if not self.rules.window_groups:
            return next(iter(ends), 0)
        since: list[int] = []  # from which block on there are all, up to each
        for i, blocks in enumerate(windows):
            since.append(i + 1 if not blocks else since[-1] if since else 0)
        return next((at for at in ends if at and since[self.blocks_for(at) - 1] <= self.first(at)), 0)

    def first(self, at: int) -> int:
        """The first block that is read from position `at` on, by those with a window."""
        return max(0, at + 1 - self.rules.window) // self.limits.block_size

    def _add_windows(self, s: Sequence, blocks: int) -> None:
        at = len(s.cache.window_blocks)
        taken = iter(self.pool.allocate(self.rules.window_groups * blocks))
        s.cache.window_blocks += zip(*[taken] * self.rules.window_groups)
        self._write_windows(s, at)

    def _write_windows(self, s: Sequence, at: int) -> None:
        blocks = s.cache.window_blocks
        if len(blocks) > at:
            self.window_tables[:, s.slot, at : len(blocks)] = np.array(blocks[at:], np.int32).T

    def _index(self, s: Sequence) -> None:
        if not (self.rules.reuse and s.keeps_prefix):
            return
        size, keys = self.limits.block_size, s.keys
        while s.cache.indexed >= 0 and (s.cache.indexed + 1) * size <= min(s.computed, len(s.tokens)):
            i = s.cache.indexed
            text, windows = keys[i * size : (i + 1) * size], self._windows_at(s, i)
            node = self.prefixes.insert(s.cache.node, text, s.cache.blocks[i], s.salt, windows)
            if node is None:
                s.cache.indexed = -1  # what it stands on is gone, so the rest cannot be entered either
                return
            if node.block != s.cache.blocks[i]:
                # Another has computed the same: one copy is enough, and it retains what the node stands on.
                self.prefixes.retain([node.block])
                self.prefixes.release([s.cache.blocks[i]])
                s.cache.blocks[i] = self.tables[s.slot, i] = node.block
            if windows and node.window_blocks and node.window_blocks != windows:
                self.prefixes.retain(node.window_blocks)
                self.prefixes.release(windows)
                s.cache.window_blocks[i] = node.window_blocks
                self.window_tables[:, s.slot, i] = node.window_blocks
            s.cache.node, s.cache.indexed = node, i + 1
            self._move_snapshots(s, node, i * size, size)

    def _keep(self, s: Sequence, tokens: list[int]) -> None:
        self._index(s)
        size, known = self.limits.block_size, min(s.computed, len(tokens))
        node, start = s.cache.node, s.cache.indexed * size
        if s.cache.indexed < 0 or known <= 0:
            return
        for start in range(s.cache.indexed * size, known, size):
            i, text = start // size, tokens[start : min(start + size, known)]
            before = s.cache.node if i == s.cache.indexed else node
            node = self.prefixes.insert(before, text, s.cache.blocks[i], s.salt, self._windows_at(s, i))
            if node is None:
                return
            self._move_snapshots(s, node, start, len(text))
        for _ in range(self.blocks_for(known), s.cache.indexed):
            # It was taken back from a wrong draft to where the launch began, and blocks that it filled are further on.
            node = node.parent if node is not None else None
        if node is not None and node.alive and self._snaps(s) and s.computed == known:
            start = (known - 1) // size * size
            self._snap(s, node.snapshots, known - start)

    def _move_snapshots(self, s: Sequence, node: Node, start: int, count: int) -> None:
        for at in [at for at in s.cache.snapshots if start < at <= start + count]:
            self.snapshots.move(s.cache.snapshots, at, node.snapshots, at - start)

    def _windows_at(self, s: Sequence, i: int) -> tuple[int, ...]:
        return s.cache.window_blocks[i] if i < len(s.cache.window_blocks) else ()

    def _free_behind_window(self, s: Sequence) -> None:
        # The next query stands at `computed`, or where a draft was wrong, or began; older ones are launched before any
        # other use.
        first = self.first(min(s.computed, len(s.tokens) + s.drawn - self.rules.rollback))
        if first <= s.cache.freed or (0 <= s.cache.indexed < first and s.keeps_prefix and self.rules.reuse):
            return
        if self.rules.window_groups:
            for i in range(s.cache.freed, first):
                self.prefixes.release(s.cache.window_blocks[i])
                s.cache.window_blocks[i] = ()
            self._blank_windows(s, first)
        else:
            self.prefixes.release(s.cache.blocks[s.cache.freed : first])
            s.cache.blocks[s.cache.freed : first] = [-1] * (first - s.cache.freed)
            self.tables[s.slot, :first] = s.cache.blocks[first] if first < len(s.cache.blocks) else 0
        s.cache.freed = first

    def _blank_windows(self, s: Sequence, first: int) -> None:
        # A kernel may load the rest of a tile in front of the window, to weigh it with nothing: rows of the sequence's own,
        # which are numbers if anything of it is.
        live = s.cache.window_blocks[first] if first < len(s.cache.window_blocks) else (0,) * self.rules.window_groups
        self.window_tables[:, s.slot, :first] = np.array(live, np.int32)[:, None]
