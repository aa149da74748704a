"""A question, its answer, and what any right answer holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tools.chat.draw import Draw


@dataclass(frozen=True)
class Turn:
    """`wanted`: words or phrases that a right answer holds, in any case; "a|b" is one of them, "!a" must be absent, and
    "=a" is the whole answer, marks at its end aside. A turn without any is not counted."""

    kind: str
    user: str
    assistant: str
    wanted: tuple[str, ...] = ()

    def right(self, answer: str) -> bool:
        text = re.sub(r"\s+", " ", answer.lower().replace("’", "'")).strip()
        return all(_holds(text, re.sub(r"\s+", " ", phrase.lower()).strip()) for phrase in self.wanted)


Topic = Callable[[Draw], list[Turn]]
"""Draws one or several turns that belong together."""


def _holds(text: str, phrase: str) -> bool:
    if phrase.startswith("="):
        return text.rstrip(".!? ") == phrase[1:].rstrip(".!? ")
    if phrase.startswith("!"):
        return not _holds(text, phrase[1:])
    return any(re.search(rf"(?<![\w-]){re.escape(word)}(?!\w)", text) for word in phrase.split("|"))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def listed(items: list[str] | tuple[str, ...]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
