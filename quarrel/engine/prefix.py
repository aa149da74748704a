"""Which tokens lie in which cache blocks: a tree of blocks by keyed hash, so that what begins alike runs once.

    key(block) = blake2b(key of the block before it, then its token ids; keyed with a secret of this process)
    the first block's predecessor is a root for its salt: callers with different salts never meet

A hit is believed only when the token ids are equal too. The tree holds each of its blocks once; those that nobody else
holds are evicted when room is wanted, the least recently used first, leaves before what they stand on. The last node of a
text may hold fewer tokens than a block has. Nodes also hold snapshots of recurrent state, by how many tokens it has seen.

Where groups of layers with a window have blocks of their own, a node holds theirs beside its block as long as there is
room for them: they may go while the node stays, and then nothing can go on from there, but from further on it can.
"""

from __future__ import annotations

import heapq
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

from quarrel.engine.pools import BlockPool, Snapshots

BRANCHES = 8
"""How many continuations of a text are looked at for one that goes on alike for a part of a block; the newest."""
WINDOWS = 4
"""One of so many blocks of the pool may be kept for layers with a window, before they go ahead of what is older: most of
them are of places in a text that nobody will go on from."""

Digest = Callable[[bytes, bytes], bytes]


@dataclass(eq=False, slots=True)
class Node:
    """A block of the tree. Roots have block -1."""

    key: bytes
    parent: Node | None
    tokens: tuple[int, ...]
    block: int
    window_blocks: tuple[int, ...] = ()  # one for each group of layers with a window, or none
    children: dict[int, dict[bytes, Node]] = field(default_factory=dict)  # by first token, then by key
    snapshots: dict[int, int] = field(default_factory=dict)  # tokens seen of this block -> slot
    stamp: int = 0
    changes: int = 0  # how often something came to stand on it
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Match:
    """`nodes` are equal in whole, but the last where `known` ends within it. `end` is the last whole one, or the root."""

    nodes: tuple[Node, ...] = ()
    known: int = 0
    end: Node | None = None


def keyed_digest() -> Digest:
    """A hash that nobody outside this process can aim at."""
    secret = secrets.token_bytes(32)
    return lambda before, tokens: blake2b(before + tokens, key=secret, digest_size=16).digest()


class PrefixTree:
    """See above. Blocks are retained and released through here alone. `limit`: blocks kept that nobody uses."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        snapshots: Snapshots,
        *,
        limit: int | None = None,
        digest: Digest | None = None,
    ) -> None:
        self._pool, self._size, self._limit = pool, block_size, limit
        self._digest = keyed_digest() if digest is None else digest
        self._snapshots = snapshots
        self._roots: dict[bytes, Node] = {}
        self._by_key: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._salts: dict[Node, bytes] = {}
        self._leaves: list[tuple[int, Node]] = []  # a heap; entries whose stamp is old mean nothing, no two nodes have one
        self._windows: OrderedDict[Node, int] = OrderedDict()  # whose window's blocks may go, and since when; oldest first
        self._clock = 0
        self.kept = 0  # blocks that only the tree holds
        self.evictions = 0
        self.window_changes = 0  # windows that came to nodes which were there without

    def __len__(self) -> int:
        return len(self._by_key)

    def nodes(self) -> list[Node]:
        return list(self._by_key.values())

    def match(self, tokens: Sequence[int], limit: int, salt: bytes = b"") -> Match:
        """The longest known beginning of `tokens[:limit]`."""
        node = self._roots.get(salt)
        if node is None:
            return Match()
        nodes: list[Node] = []
        known = 0
        while known + self._size <= limit:
            block = tuple(tokens[known : known + self._size])
            found = self._by_key.get(self._key(node, block))
            if found is None or found.tokens != block or found.parent is not node:
                break
            nodes.append(found)
            node, known = found, known + self._size
        rest = tuple(tokens[known : min(limit, known + self._size)])
        best, most = None, 0
        for child in islice(reversed(node.children.get(rest[0], {}).values()), BRANCHES) if rest else ():
            if (n := common_prefix(child.tokens, rest)) > most:
                best, most = child, n
        if best is not None:
            nodes.append(best)
        self._touch(nodes)
        return Match(tuple(nodes), known + most, node)

    def insert(
        self, parent: Node | None, tokens: Sequence[int], block: int, salt: bytes = b"", windows: tuple[int, ...] = ()
    ) -> Node | None:
        """The node for `tokens` behind `parent` (None is the beginning), which holds `block` unless another holds the same,
        and `windows`, the blocks of groups with a window, unless it has such.

        None if it cannot be there: the parent is gone, or the hash is another text's.
        """
        if parent is None:
            parent = self._roots.get(salt) or Node(self._key(None, (), salt), None, (), -1)
        if not parent.alive:
            return None
        text = tuple(tokens)
        assert 0 < len(text) <= self._size
        key = self._key(parent, text)
        found = self._by_key.get(key)
        if found is not None:
            if found.tokens != text or found.parent is not parent:
                return None
            if not found.window_blocks:
                self._attach_windows(found, windows)
                self.window_changes += 1
            return found
        if block in self._by_block:
            return None  # the same block is there as another text already: a half-used one that others went on from
        shorter = []
        for other in islice(reversed(parent.children.get(text[0], {}).values()), BRANCHES):
            if other.tokens[: len(text)] == text:
                return other  # nothing new: a longer one begins like this
            if text[: len(other.tokens)] == other.tokens and not other.children:
                shorter.append(other)
        node = Node(key, parent, text, block, stamp=self._tick())
        self._by_key[key] = self._by_block[block] = parent.children.setdefault(text[0], {})[key] = node
        if parent.block < 0:
            self._roots[salt], self._salts[parent] = parent, salt
        parent.changes += 1
        self._pool.retain([block])
        self._attach_windows(node, windows)
        for other in shorter:
            self._supersede(other, node)
        return node

    def retain(self, blocks: Iterable[int]) -> None:
        """One more owner of blocks that have one."""
        blocks = list(blocks)
        for block in blocks:
            node = self._by_block.get(block)
            if node is not None and self._pool.ref_count(block) == 1:
                self.kept -= 1
                if block != node.block:
                    self._windows.pop(node, None)
        self._pool.retain(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """One owner fewer. Blocks that only the tree owns may be evicted."""
        for block in blocks:
            self._pool.release([block])
            node = self._by_block.get(block)
            if node is not None and self._pool.ref_count(block) == 1:
                self.kept += 1
                if block == node.block:
                    self._offer(node)
                else:
                    self._windows[node] = self._tick()
                    self._windows.move_to_end(node)
        while self._limit is not None and self.kept > self._limit and (self._evict() or self._evict_branch()):
            pass

    def make_room(self, count: int) -> bool:
        """Evicts until `count` blocks are free, or nothing is left to evict; says whether they are."""
        while self._pool.free < count and (self._evict() or self._evict_branch()):
            pass
        return self._pool.free >= count

    def clear(self) -> None:
        """Forgets everything that nobody else holds, and finds nothing of the rest any more."""
        for node in self.nodes():
            self._remove(node)
        self._leaves.clear()

    def forget(self, blocks: Iterable[int]) -> None:
        """Takes out what lies in these blocks and all that stands on it: nobody finds it any more."""
        doomed = [self._by_block[b] for b in blocks if b in self._by_block]
        for node in doomed:  # grows while it is read
            doomed.extend(child for alike in node.children.values() for child in alike.values())
        for node in reversed(doomed):
            if node.alive:
                self._remove(node)

    def _key(self, parent: Node | None, tokens: tuple[int, ...], salt: bytes = b"") -> bytes:
        return self._digest(b"" if parent is None else parent.key, salt if parent is None else array("q", tokens).tobytes())

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _touch(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            node.stamp = self._tick()
            if self._pool.ref_count(node.block) == 1:
                self._offer(node)

    def _offer(self, node: Node) -> None:
        if node.alive and node.block >= 0 and not node.children:
            heapq.heappush(self._leaves, (node.stamp, node))
            if len(self._leaves) > 4 * len(self._by_block) + 64:
                self._leaves = [(stamp, node) for stamp, node in self._leaves if node.alive and node.stamp == stamp]
                heapq.heapify(self._leaves)

    def _attach_windows(self, node: Node, windows: tuple[int, ...]) -> None:
        if windows and not any(block in self._by_block for block in windows):
            node.window_blocks = windows
            self._by_block.update(dict.fromkeys(windows, node))
            self._pool.retain(windows)

    def _evict(self) -> bool:
        leaf, windows = self._oldest_leaf(), next(iter(self._windows), None)
        if windows is not None:
            many = len(self._windows) * len(windows.window_blocks) > self._pool.n_blocks // WINDOWS
            if leaf is None or many or self._windows[windows] < leaf.stamp:
                self.evictions += 1
                self._drop_windows(windows)
                return True
        if leaf is None:
            return False
        self.evictions += 1
        self._remove(leaf)
        return True

    def _oldest_leaf(self) -> Node | None:
        while self._leaves:
            stamp, node = self._leaves[0]
            if node.alive and node.stamp == stamp and not node.children and self._pool.ref_count(node.block) == 1:
                return node
            heapq.heappop(self._leaves)
        return None

    def _drop_windows(self, node: Node) -> None:
        for block in node.window_blocks:
            del self._by_block[block]
        self.kept -= sum(self._pool.ref_count(b) == 1 for b in node.window_blocks)
        self._pool.release(node.window_blocks)
        node.window_blocks = ()
        self._windows.pop(node, None)

    def _evict_branch(self) -> bool:
        """Where a window has let go of the beginnings of texts that still run, these are all that can go."""
        kept = [node for node in self._by_key.values() if self._pool.ref_count(node.block) == 1]
        if not kept:
            return False
        self.evictions += 1
        self.forget([min(kept, key=lambda node: node.stamp).block])
        return True

    def _supersede(self, old: Node, new: Node) -> None:
        for at in list(old.snapshots):
            self._snapshots.move(old.snapshots, at, new.snapshots, at)
        self._remove(old)

    def _remove(self, node: Node) -> None:
        node.alive = False
        del self._by_key[node.key], self._by_block[node.block]
        for slot in list(node.snapshots.values()):
            self._snapshots.drop(slot)
        self._drop_windows(node)
        parent = node.parent
        assert parent is not None
        alike = parent.children.get(node.tokens[0])
        if alike is not None:
            alike.pop(node.key, None)
            if not alike:
                del parent.children[node.tokens[0]]
        if self._pool.ref_count(node.block) == 1:
            self.kept -= 1
        self._pool.release([node.block])
        if parent.block >= 0 and parent.alive and self._pool.ref_count(parent.block) == 1:
            self._offer(parent)
        elif parent.block < 0 and not parent.children:
            parent.alive = False
            self._roots.pop(self._salts.pop(parent, b""), None)


def common_prefix(a: Sequence[int], b: Sequence[int], stride: int = 256) -> int:
    """How many tokens `a` and `b` begin with alike; slices compare at C speed, so only the last stride is walked."""
    limit = min(len(a), len(b))
    at = 0
    while at + stride <= limit and tuple(a[at : at + stride]) == tuple(b[at : at + stride]):
        at += stride
    while at < limit and a[at] == b[at]:
        at += 1
    return at
