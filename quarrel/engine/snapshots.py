"""Slots for copies of recurrent state: whoever reads a known text again goes on from one of them."""

from __future__ import annotations

from collections import OrderedDict

Owner = dict[int, int]
"""Where a copy was taken (a count of tokens) -> its slot; held by a running sequence, or by a node of the prefix tree."""


class Snapshots:
    """Slots from `first` to `end - 1`. When all are in use, the one that was used longest ago goes."""

    def __init__(self, first: int, end: int) -> None:
        self._free = list(range(end - 1, first - 1, -1))
        self._held: OrderedDict[int, tuple[Owner, int]] = OrderedDict()
        self.size = max(0, end - first)
        self.taken = 0

    def __len__(self) -> int:
        return len(self._held)

    def take(self, owner: Owner, at: int) -> int | None:
        """A slot, entered at `owner[at]`, or None if there are no slots at all."""
        if at in owner:
            self.touch(owner[at])
            return None
        if not self.size:
            return None
        if not self._free:
            self.drop(next(iter(self._held)))
        self.taken += 1
        slot = owner[at] = self._free.pop()
        self._held[slot] = (owner, at)
        return slot

    def touch(self, slot: int) -> None:
        """Marks as used now."""
        self._held.move_to_end(slot)

    def move(self, owner: Owner, at: int, to: Owner, there: int) -> None:
        """Enters a slot elsewhere; one that is there already stays, and this one is free."""
        slot = owner[at]
        if there in to:
            self.drop(slot)
        else:
            del owner[at]
            to[there] = slot
            self._held[slot] = (to, there)

    def drop(self, slot: int) -> None:
        """Frees it and takes it out where it was entered."""
        owner, at = self._held.pop(slot)
        del owner[at]
        self._free.append(slot)
