"""What finished sequences leave in the cache, so that a conversation that goes on does not start again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from quarrel.engine.blocks import BlockPool

MAX_KEPT = 32
"""Sequences remembered at most; looking through them costs microseconds each."""


@dataclass(frozen=True)
class Kept:
    """Tokens whose keys and values are in `blocks`, in order."""

    tokens: tuple[int, ...]
    blocks: tuple[int, ...]


class PrefixStore:
    """Finished sequences, least recently used first. It holds their blocks until they are wanted elsewhere."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self._kept: OrderedDict[tuple[int, ...], Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def entries(self) -> list[Kept]:
        return list(self._kept.values())

    def keep(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Takes over one hold on the blocks that `tokens` fill; the caller's other blocks stay the caller's."""
        entry = Kept(tuple(tokens), tuple(blocks))
        assert len(entry.blocks) == -(-len(entry.tokens) // self._block_size)
        for other in self.entries():
            if other.tokens[: len(entry.tokens)] == entry.tokens:  # nothing new: a longer one begins like this
                self.touch(other)
                self._pool.give_back(entry.blocks)
                return
            if entry.tokens[: len(other.tokens)] == other.tokens:
                self._drop(other)
        self._kept[entry.tokens] = entry
        while len(self._kept) > MAX_KEPT:
            self.evict()

    def touch(self, entry: Kept) -> None:
        """Marks as used now."""
        self._kept.move_to_end(entry.tokens)

    def evict(self) -> None:
        """Lets go of the least recently used."""
        self._drop(next(iter(self._kept.values())))

    def make_room(self, count: int) -> bool:
        """Evicts until `count` blocks are free, or nothing is left to evict; says whether they are."""
        while self._pool.free < count and self._kept:
            self.evict()
        return self._pool.free >= count

    def clear(self) -> None:
        while self._kept:
            self.evict()

    def _drop(self, entry: Kept) -> None:
        del self._kept[entry.tokens]
        self._pool.give_back(entry.blocks)


def common_prefix(a: Sequence[int], b: Sequence[int], stride: int = 256) -> int:
    """How many tokens `a` and `b` begin with alike; slices compare at C speed, so only the last stride is walked."""
    limit = min(len(a), len(b))
    at = 0
    while at + stride <= limit and tuple(a[at : at + stride]) == tuple(b[at : at + stride]):
        at += stride
    while at < limit and a[at] == b[at]:
        at += 1
    return at
