"""Guessing the next tokens from the text itself: what followed the last time that it ended like this (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

SPAN = 3
"""Tokens that must agree."""
MAX_PAUSE = 32


class Lookup:
    """Follows one sequence. A guess that was all wrong is followed by a pause, twice as long each time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._behind: dict[tuple[int, ...], int] = {}  # the last tokens -> where what follows them begins
        self._seen = 0
        self._pause = self._wait = 0

    def draft(self, tokens: Sequence[int], room: int) -> Sequence[int]:
        """Up to `room` tokens that may follow."""
        # The end of the text itself is entered only when something follows it.
        for end in range(max(self._seen + 1, SPAN), len(tokens)):
            self._behind[tuple(tokens[end - SPAN : end])] = end
        self._seen = max(self._seen, len(tokens) - 1)
        if self._wait:
            self._wait -= 1
            return ()
        at = self._behind.get(tuple(tokens[-SPAN:]))
        return () if at is None else tokens[at : at + min(room, self._most)]

    def told(self, right: int) -> None:
        """How much of the last guess was right."""
        self._pause = 0 if right else min(max(1, 2 * self._pause), MAX_PAUSE)
        self._wait = self._pause
