"""The queue of a model: in which order sequences wait, how many places there are, and what one too many is answered."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quarrel.engine.sequence import Sequence
from quarrel.engine.stats import Stats
from quarrel.errors import QueueFull

MAX_WAITING = 1024
"""Sequences beyond those that run, by default."""
SOONEST, LATEST = 0.05, 60.0
"""Bounds of `retry_after`, in seconds."""


def retry_after(stats: Stats, missing: int) -> float:
    """Seconds until `missing` more places are likely to be free, as requests of this model end of late (one a second as
    long as that is not known)."""
    return min(max((stats.end_interval or 1.0) * max(1, missing), SOONEST), LATEST)


class Places:
    """The places of a model's sequences, running or waiting. Not safe for threads."""

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0

    def take(self, count: int, stats: Stats) -> None:
        """Takes `count` places, or raises `QueueFull` and takes none."""
        missing = self.used + count - self.size
        if missing > 0:
            after = retry_after(stats, missing)
            raise QueueFull(
                f"{self.used} requests run or wait already, of at most {self.size}: try again in {after:.2g} seconds", after
            )
        self.used += count

    def free(self, count: int = 1) -> None:
        self.used -= count


class WaitingQueue:
    """Sequences by `place`, the smallest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._there: set[int] = set()

    def __len__(self) -> int:
        return len(self._there)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.order in self._there

    def __iter__(self) -> Iterator[Sequence]:
        """In order."""
        return iter(s for _, order, s in sorted(self._heap, key=lambda e: e[:2]) if order in self._there)

    def push(self, sequence: Sequence) -> None:
        assert sequence.order not in self._there
        self._there.add(sequence.order)
        heapq.heappush(self._heap, (*sequence.place, sequence))

    def pop(self) -> Sequence | None:
        """Takes out the first."""
        while self._heap:
            _, order, sequence = heapq.heappop(self._heap)
            if order in self._there:
                self._there.remove(order)
                return sequence
        return None

    def remove(self, sequence: Sequence) -> None:
        """Takes it out, if it is there."""
        if sequence.order not in self._there:
            return
        self._there.remove(sequence.order)
        if len(self._heap) > 2 * len(self._there) + 64:
            self._heap = [e for e in self._heap if e[1] in self._there]
            heapq.heapify(self._heap)
