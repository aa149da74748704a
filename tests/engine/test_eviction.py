"""The tree and its pool against a plain list of what must be there: what is found, which goes first, and what is free."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from quarrel.engine.pools import BlockPool, Snapshots
from quarrel.engine.prefix import BRANCHES, WINDOWS, Node, PrefixTree

SIZE = 2
SLOTS = 4


@dataclass(eq=False)
class Kept:
    """A block of the tree. Its text is `before` and then `tokens`."""

    salt: bytes
    before: tuple[int, ...]
    tokens: tuple[int, ...]
    block: int
    stamp: int
    windows: tuple[int, ...] = ()
    since: int = 0  # when they were let go of
    states: dict[int, int] = field(default_factory=dict)

    @property
    def text(self) -> tuple[int, ...]:
        return self.before + self.tokens


class Plain:
    """What the tree must do, searched for in a list each time."""

    def __init__(self, n_blocks: int, limit: int | None) -> None:
        self.holders = [0] * n_blocks  # the tree is one
        self.limit = limit
        self.kept: list[Kept] = []  # in the order in which they came
        self.slots: list[tuple[Kept, int]] = []  # snapshots, the least recently used first
        self.clock = self.evictions = self.window_changes = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    @property
    def free(self) -> int:
        return self.holders.count(0)

    @property
    def unused(self) -> int:
        return sum(self.holders[b] == 1 for k in self.kept for b in (k.block, *k.windows))

    def behind(self, salt: bytes, text: tuple[int, ...], first: int) -> list[Kept]:
        """What goes on from a text, and begins so; the newest of it, newest first."""
        alike = [k for k in self.kept if (k.salt, k.before) == (salt, text) and k.tokens[0] == first]
        return alike[::-1]

    def stands_on(self, k: Kept) -> list[Kept]:
        return [x for x in self.kept if x.salt == k.salt and x.before[: len(k.text)] == k.text and x is not k]

    def match(self, tokens: tuple[int, ...], limit: int, salt: bytes) -> tuple[list[Kept], int]:
        tokens, found, known = tokens[:limit], [], 0
        while known + SIZE <= len(tokens) and (
            whole := [k for k in self.kept if (k.salt, k.text) == (salt, tokens[: known + SIZE])]
        ):
            found += whole
            known += SIZE
        if known < len(tokens):
            rest = tokens[known:]
            near = self.behind(salt, tokens[:known], rest[0])[:BRANCHES]
            best = max(near, key=lambda k: alike(k.tokens, rest), default=None)
            if best is not None:
                found.append(best)
                known += alike(best.tokens, rest)
        for k in found:
            k.stamp = self.tick()
        return found, known

    def insert(
        self, salt: bytes, before: tuple[int, ...], tokens: tuple[int, ...], block: int, windows: tuple[int, ...]
    ) -> Kept | None:
        if before and not any((k.salt, k.text) == (salt, before) for k in self.kept):
            return None
        near = self.behind(salt, before, tokens[0])
        same = next((k for k in near if k.tokens == tokens), None)
        if same is not None:
            if not same.windows:
                self.attach(same, windows)
                self.window_changes += 1
            return same
        if any(block in (k.block, *k.windows) for k in self.kept):
            return None
        shorter = []
        for k in near[:BRANCHES]:
            if k.tokens[: len(tokens)] == tokens:
                return k
            if tokens[: len(k.tokens)] == k.tokens:
                shorter.append(k)
        new = Kept(salt, before, tokens, block, self.tick())
        self.holders[block] += 1
        self.attach(new, windows)
        self.kept.append(new)
        for k in shorter:
            for at in list(k.states):
                if at in new.states:
                    self.slots.remove((k, at))
                else:
                    new.states[at] = k.states[at]
                    self.slots[self.slots.index((k, at))] = (new, at)
            k.states.clear()
            self.remove(k)
        return new

    def attach(self, k: Kept, windows: tuple[int, ...]) -> None:
        if not any(w in (x.block, *x.windows) for x in self.kept for w in windows):
            k.windows = windows
            for w in windows:
                self.holders[w] += 1

    def add_state(self, k: Kept, at: int, slot: int | None) -> None:
        if at in k.states:
            self.slots.remove((k, at))
        elif len(self.slots) == SLOTS:
            old, where = self.slots.pop(0)
            del old.states[where]
        if slot is not None:
            k.states[at] = slot
        self.slots.append((k, at))

    def release(self, blocks: Iterable[int]) -> None:
        for b in blocks:
            self.holders[b] -= 1
            for k in self.kept:
                if b in k.windows and self.holders[b] == 1:
                    k.since = self.tick()
        while self.limit is not None and self.unused > self.limit and self.evict():
            pass

    def make_room(self, count: int) -> bool:
        while self.free < count and self.evict():
            pass
        return self.free >= count

    def evict(self) -> bool:
        lost = [k for k in self.kept if self.holders[k.block] == 1]
        leaf = min((k for k in lost if not self.stands_on(k)), key=lambda k: k.stamp, default=None)
        loose = [k for k in self.kept if k.windows and all(self.holders[w] == 1 for w in k.windows)]
        window = min(loose, key=lambda k: k.since, default=None)
        if not lost and window is None:
            return False
        self.evictions += 1
        if window is not None:
            many = len(loose) * len(window.windows) > len(self.holders) // WINDOWS
            if leaf is None or many or window.since < leaf.stamp:
                self.drop_windows(window)
                return True
        self.forget(leaf or min(lost, key=lambda k: k.stamp))
        return True

    def drop_windows(self, k: Kept) -> None:
        for w in k.windows:
            self.holders[w] -= 1
        k.windows = ()

    def forget(self, k: Kept) -> None:
        for x in [*self.stands_on(k), k]:
            self.remove(x)

    def remove(self, k: Kept) -> None:
        self.drop_windows(k)
        self.holders[k.block] -= 1
        self.slots = [s for s in self.slots if s[0] is not k]
        self.kept.remove(k)


def alike(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class Both:
    """The tree and the plain list of what must be in it, which are told the same."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.groups, limit = chance.choice([0, 0, 2]), chance.choice([None, None, 0, 3])
        n_blocks = chance.choice([9, 15, 40])
        self.pool, self.snapshots = BlockPool(n_blocks), Snapshots(3, 3 + SLOTS)
        self.tree = PrefixTree(self.pool, SIZE, self.snapshots, limit=limit)
        self.plain = Plain(n_blocks, limit)
        self.held: list[list[int]] = []  # by those who run

    def text(self) -> tuple[int, ...]:
        return tuple(self.chance.choices((1, 2, 3), weights=(6, 2, 1), k=self.chance.randint(1, 7)))

    def salt(self) -> bytes:
        return self.chance.choice([b"", b"", b"x"])

    def there(self) -> list[tuple[Node, Kept]]:
        """What is in both, by block."""
        plain = {k.block: k for k in self.plain.kept}
        return [(n, plain[n.block]) for n in self.tree.nodes()]

    def keep(self) -> None:
        text, salt = self.text(), self.salt()
        count = -(-len(text) // SIZE)
        room = self.tree.make_room(count * (1 + self.groups))
        assert room == self.plain.make_room(count * (1 + self.groups))
        if not room:
            return
        mine, node = [], None
        for start in range(0, len(text), SIZE):
            (block,) = self.pool.allocate(1)
            windows = tuple(self.pool.allocate(self.groups)) if self.chance.random() < 0.7 else ()
            for b in (block, *windows):
                self.plain.holders[b] = 1
            mine += [block, *windows]
            piece = text[start : start + SIZE]
            node = self.tree.insert(node, piece, block, salt, windows)
            known = self.plain.insert(salt, text[:start], piece, block, windows)
            assert (node is None) == (known is None)
            if node is None or known is None:
                break
            assert (node.block, node.tokens) == (known.block, known.tokens)
        self.held.append(mine)
        if self.chance.random() < 0.6:
            self.release()

    def match(self, hold: bool = True) -> None:
        text, salt = self.text(), self.salt()
        limit = self.chance.randint(0, len(text))
        match, (wanted, known) = self.tree.match(text, limit, salt), self.plain.match(text, limit, salt)
        assert (match.known, [n.block for n in match.nodes]) == (known, [k.block for k in wanted])
        whole = [k.block for k in wanted if len(k.tokens) == SIZE and len(k.text) <= known]
        assert match.end is None or match.end.block == (whole[-1] if whole else -1)
        if hold and wanted and self.chance.random() < 0.5:
            first = self.chance.randint(0, len(wanted))
            mine = [*(k.block for k in wanted), *(w for k in wanted[first:] for w in k.windows)]
            self.tree.retain(mine)
            for b in mine:
                self.plain.holders[b] += 1
            self.held.append(mine)

    def release(self) -> None:
        if self.held:
            mine = self.held.pop(self.chance.randrange(len(self.held)))
            if self.chance.random() < 0.3:
                self.chance.shuffle(mine)
            self.tree.release(mine)
            self.plain.release(mine)

    def copy(self) -> None:
        if pairs := self.there():
            node, known = self.chance.choice(pairs)
            at = self.chance.randint(1, len(node.tokens))
            self.plain.add_state(known, at, self.snapshots.add(node.snapshots, at) or known.states.get(at))

    def forget(self) -> None:
        if pairs := self.there():
            node, known = self.chance.choice(pairs)
            blocks = [node.block, *(x.block for x in self.plain.stands_on(known)[:1])]
            self.tree.forget(blocks)
            self.plain.forget(known)

    def make_room(self) -> None:
        count = self.chance.randint(1, self.pool.n_blocks)
        assert self.tree.make_room(count) == self.plain.make_room(count)

    def clear(self) -> None:
        self.tree.clear()
        for k in list(self.plain.kept):
            self.plain.remove(k)
        assert not self.tree._leaves
        assert not self.tree._roots
        assert not self.tree._salts

    def compare(self) -> None:
        assert [self.pool.ref_count(b) for b in range(self.pool.n_blocks)] == self.plain.holders
        assert (self.pool.free, self.tree.kept) == (self.plain.free, self.plain.unused)
        found = {(n.block, n.tokens, n.window_blocks, tuple(n.snapshots.items())) for n in self.tree.nodes()}
        assert found == {(k.block, k.tokens, k.windows, tuple(k.states.items())) for k in self.plain.kept}
        assert (len(self.tree), self.tree.evictions) == (len(self.plain.kept), self.plain.evictions)
        assert len(self.snapshots) == len(self.plain.slots)
        assert len(self.tree._leaves) <= 4 * len(self.tree._by_block) + 64


@pytest.mark.parametrize("seeds", [range(i, i + 12) for i in (0, 12, 24)], ids=str)
def test_the_tree_keeps_finds_and_evicts_what_a_plain_list_would(seeds: range) -> None:
    for seed in seeds:
        both = Both(random.Random(seed))
        does = [both.keep] * 8 + [both.match] * 6 + [both.release] * 4 + [both.copy] * 3 + [both.forget, both.make_room]
        for i in range(120):
            changes = both.tree.window_changes, both.plain.window_changes
            both.chance.choice(does)()
            both.compare()
            now = both.tree.window_changes, both.plain.window_changes
            assert (now[0] > changes[0]) == (now[1] > changes[1])
            if i == 60:  # used so often that old entries are cleared away
                for _ in range(150):
                    both.match(hold=False)
            if i == 100:
                both.clear()
                both.compare()
        while both.held:
            both.release()
            both.compare()
        assert both.tree.make_room(both.pool.n_blocks)
