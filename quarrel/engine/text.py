"""Text as it becomes certain, and what the engine has to know of a vocabulary and of a grammar.

Stop strings are found across token borders, and never shown in part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt


class Detokenizer(Protocol):
    """Ids to text, one by one; holds back what is not yet a whole character."""

    def push(self, id: int) -> str: ...

    def flush(self) -> str: ...


class Texts(Protocol):
    """What the engine has to know of a vocabulary."""

    def detokenizer(self) -> Detokenizer:
        """A new one, for text that continues a prompt."""

    def token_bytes(self, id: int) -> bytes:
        """What one token adds to a text."""


class StopText:
    """Text from a detokenizer, kept back while it might be the beginning of a stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._pending = ""
        self.stopped_by: str | None = None

    def push(self, id: int, armed: bool = True) -> str:
        """The text that is certain now. After a match `stopped_by` is set, and the match and all behind it are gone.

        Unless `armed`, stop strings are text like any other.
        """
        text = self._detokenizer.push(id)
        if not self._stops:
            return text
        self._pending += text
        return self._match() if armed else self._release(0)

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        self._pending += self._detokenizer.flush()
        return self._match() + self._release(0)

    def _match(self) -> str:
        found = [(at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda match: (match[0], -len(match[1])))
            text, self._pending = self._pending[:at], ""
            return text
        return self._release(max((_overlap(self._pending, stop) for stop in self._stops), default=0))

    def _release(self, kept: int) -> str:
        cut = len(self._pending) - kept
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


class Guide(Protocol):
    """How far one text is in a grammar."""

    ends: frozenset[int]
    """Ids that end the text where the grammar allows an end."""

    def allowed(self) -> npt.NDArray[Any]:
        """bool `[V]`: what may come next. Computed once for each position, while a device is busy if there is one."""

    def take(self, token: int) -> bool:
        """Goes on by a token that is allowed; says whether nothing can follow it."""


MakeGuide = Callable[[], Guide]
"""Makes a guide for a new text."""
