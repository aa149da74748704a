"""Drafts for one sequence: prompt lookup, which proposes what followed the last time that the text ended like this; and how
many tokens a draft model shall propose: more after drafts that were right, none for a while after a wrong one."""

from __future__ import annotations

from collections.abc import Sequence

SPAN = 3
"""Tokens that must agree."""
MAX_PAUSE = 32


class Lookup:
    """Follows one sequence. A draft that was all wrong is followed by a pause, twice as long each time."""

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

    def observe(self, right: int) -> None:
        """How many tokens of the last draft were right."""
        self._pause = 0 if right else min(max(1, 2 * self._pause), MAX_PAUSE)
        self._wait = self._pause


LONGEST_PAUSE = 8


class Pace:
    """Follows the drafts for one sequence, of at most `most` tokens each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._next = min(most, 4)
        self._pause = self._wait = 0

    def ahead(self) -> int:
        """How many tokens to propose now. Called once for each step."""
        if self._wait:
            self._wait -= 1
            return 0
        return self._next

    def observe(self, guessed: int, right: int) -> None:
        """How many tokens of the last draft were right."""
        self._next = min(self._most, 2 * self._next if right == guessed else right + 1)
        self._pause = 0 if right else min(max(1, 2 * self._pause), LONGEST_PAUSE)
        self._wait = self._pause
