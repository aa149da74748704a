"""The queue: by turn, with ways out for those who do not wait to its end."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quarrel.engine.sequence import Sequence


class Waiting:
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
