"""What a model thinks, taken out of what it says, as it comes: the text between a template's tags at its beginning."""

from __future__ import annotations

from collections.abc import Sequence

from quarrel.llm import Model

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
_TAIL = 16
"""Tokens of a prompt that an opening tag and the space behind it take at most."""


def opened_by(llm: Model, tokens: Sequence[int]) -> str | None:
    """The tag that closes what the prompt, by its template, has opened."""
    end = llm.detokenize(tokens[-_TAIL:], False).rstrip()
    return next((close for open, close in TAGS if end.endswith(open)), None)


class Thoughts:
    """Of one text. close: the tag that ends a thought which the prompt began. told: all of it is said, tags and all."""

    def __init__(self, close: str | None = None, *, told: bool = False) -> None:
        self._close, self._said, self._held = close, told, ""
        self._begins = close is not None
        self._gap = False

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """What is certain with this text: thoughts, and what is said. last: nothing comes behind it."""
        if self._said:
            text = text.lstrip("\n") if self._gap else text
            self._gap = self._gap and not text
            return "", text
        self._held += text
        if self._close is None:
            start = self._held.lstrip()
            found = next(((o, c) for o, c in TAGS if start.startswith(o)), None)
            if found is None:
                if not last and any(o.startswith(start) for o, _ in TAGS):
                    return "", ""
                return "", self._rest(self._held)
            self._close, self._held, self._begins = found[1], start[len(found[0]) :], True
        if self._begins and (self._held.strip() or last):
            self._held, self._begins = self._held.lstrip(), False
        thought, tag, rest = self._held.partition(self._close)
        if tag:
            rest = rest.lstrip("\n")
            self._gap = not rest
            return thought.rstrip(), self._rest(rest)
        keep = 0 if last else _held_back(self._held, self._close)
        thought, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return thought, ""

    def _rest(self, text: str) -> str:
        self._said, self._held = True, ""
        return text


def _held_back(text: str, tag: str) -> int:
    """How many characters at the end may be the spaces before the tag, or its beginning."""
    for length in range(min(len(tag) - 1, len(text)), -1, -1):
        if text.endswith(tag[:length]):
            return len(text) - len(text[: len(text) - length].rstrip())
    return 0
