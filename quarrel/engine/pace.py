"""How far ahead to guess: further after guesses that were right, and not at all for a while after some that were wrong."""

from __future__ import annotations

LONGEST_PAUSE = 8


class Pace:
    """Follows the guesses for one sequence, of `most` tokens at a time at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._next = min(most, 4)
        self._pause = self._wait = 0

    def ahead(self) -> int:
        """How many tokens to guess now. To be asked once for each step."""
        if self._wait:
            self._wait -= 1
            return 0
        return self._next

    def told(self, guessed: int, right: int) -> None:
        """How much of the last guess was right."""
        self._next = min(self._most, 2 * self._next if right == guessed else right + 1)
        self._pause = 0 if right else min(max(1, 2 * self._pause), LONGEST_PAUSE)
        self._wait = self._pause
