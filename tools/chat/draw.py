"""Random choices of the dialogues: wordings, some of which are kept for the evaluation, and how people type."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_CHOICE = re.compile(r"\[([^\[\]]*\|[^\[\]]*)\]")
_FIELD = re.compile(r"(\{[a-z_]+\})")
_POLITE = ("please ", "hey, ", "ok, ", "so ", "well, ", "now ", "can you help me? ", "quick question: ", "hi! ", "um, ")
_THANKS = (" please", " please?", " thanks", " thank you")


class Draw:
    """Choices from one seed. `heldout`: wordings that training never sees, typed without noise. `passages`: beginnings
    of passages of books, and how they go on."""

    def __init__(self, seed: int, heldout: bool = False, passages: Sequence[tuple[str, str]] = ()) -> None:
        self.rng = random.Random(seed)
        self.heldout = heldout
        self.passages = passages

    def of(self, options: Sequence[T]) -> T:
        return options[self.rng.randrange(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        return self.rng.sample(list(options), count)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def say(self, options: Sequence[str], **fields: object) -> str:
        """An answer: one of the wordings, its [a|b] chosen and its {fields} filled."""
        return self._expand(self.of(options)).format(**fields)

    def ask(self, options: Sequence[str], **fields: object) -> str:
        """A question as a person types it. The fields stay as they are; every sixth wording is kept for the evaluation."""
        kept = held(options)
        chosen = [option for option in options if (option in kept) == self.heldout]
        text = self._expand(self.of(chosen))
        return (text if self.heldout else self._typed(text)).format(**fields)

    def _expand(self, text: str) -> str:
        while found := _CHOICE.search(text):
            text = text[: found.start()] + self.of(found[1].split("|")) + text[found.end() :]
        return text

    def _typed(self, text: str) -> str:
        """Small letters, missing marks, politeness, a slip of the finger; never inside a field."""
        if self.chance(0.08) and text[0].isalpha():
            text = self.of(_POLITE) + text[0].lower() + text[1:]
            if self.chance(0.5):
                text = text[0].upper() + text[1:]
        if self.chance(0.06) and text[-1] in "?.":
            text = text[:-1] + self.of(_THANKS)
        if self.chance(0.2):
            text = text.lower()
        if self.chance(0.15) and text[-1] in "?.!":
            text = text[:-1]
        if self.chance(0.05):
            parts = _FIELD.split(text)
            at = self.rng.randrange(0, len(parts), 2)
            parts[at] = self._slipped(parts[at])
            text = "".join(parts)
        return text

    def _slipped(self, text: str) -> str:
        if len(text) < 5:
            return text
        at = self.rng.randrange(1, len(text) - 2)
        if not text[at : at + 2].isalpha():
            return text
        kind = self.rng.randrange(3)
        middle = (text[at + 1] + text[at], text[at + 1], text[at] * 2 + text[at + 1])[kind]
        return text[:at] + middle + text[at + 2 :]


def held(options: Sequence[str]) -> frozenset[str]:
    """The wordings kept for the evaluation: of three or more, every sixth, at least one."""
    if len(options) < 3:
        raise ValueError(f"there are {len(options)} wordings, wanted at least 3: {options}")
    order = sorted(set(options) - {"{q}"}, key=lambda option: zlib.crc32(option.encode()))
    return frozenset(order[: max(1, len(order) // 6)])
