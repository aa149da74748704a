"""The pool of cache blocks: who holds how many of what, in plain ints."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Blocks 0 to n - 1. A block is free, or held by one or more owners; the last one to let go frees it."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._holders = [0] * n_blocks
        # Low numbers go out first and come back first, so that a short run touches little memory.
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """`count` free blocks, now held once; there must be so many."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder of blocks that are held already."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free"
            self._holders[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One holder fewer."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free already"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)
