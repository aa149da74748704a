"""What a cache is made of, in plain ints: blocks with reference counts, and slots for snapshots of recurrent state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Blocks 0 to n - 1. A block is free, or has a count of its owners; the last one to release it frees it."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._ref_counts = [0] * n_blocks
        # Low numbers go out first and come back first, so that a short run touches little memory.
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, with one owner each; there must be so many."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._ref_counts[block] = 1
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """One more owner of blocks that have one."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is free"
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner fewer."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is free already"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)


Owner = dict[int, int]
"""Where a copy was taken (a count of tokens) -> its slot; of a running sequence, or of a node of the prefix tree."""


class Snapshots:
    """Slots from `first` to `end - 1` for copies of recurrent state. When all are in use, the least recently used goes."""

    def __init__(self, first: int, end: int) -> None:
        self._free = list(range(end - 1, first - 1, -1))
        self._owners: OrderedDict[int, tuple[Owner, int]] = OrderedDict()
        self.size = max(0, end - first)
        self.added = 0

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, slot: int) -> bool:
        return slot in self._owners

    def add(self, owner: Owner, at: int) -> int | None:
        """A slot, entered at `owner[at]`, or None if there are no slots at all."""
        if at in owner:
            self.touch(owner[at])
            return None
        if not self.size:
            return None
        if not self._free:
            self.drop(next(iter(self._owners)))
        self.added += 1
        slot = owner[at] = self._free.pop()
        self._owners[slot] = (owner, at)
        return slot

    def touch(self, slot: int) -> None:
        """Marks as used now."""
        self._owners.move_to_end(slot)

    def move(self, owner: Owner, at: int, to: Owner, there: int) -> None:
        """Enters a slot elsewhere; one that is there already stays, and this one is free."""
        slot = owner[at]
        if there in to:
            self.drop(slot)
        else:
            del owner[at]
            to[there] = slot
            self._owners[slot] = (to, there)

    def drop(self, slot: int) -> None:
        """Frees it and takes it out where it was entered."""
        owner, at = self._owners.pop(slot)
        del owner[at]
        self._free.append(slot)
