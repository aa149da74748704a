"""What a model thinks, taken out of what it says, as it comes: the text between a template's tags at its beginning."""

from __future__ import annotations

from quarrel.llm.thinking import TAGS


class Thoughts:
    """Of one text. close: the tag that ends a thought which the prompt began. whole: all of it is said, tags and all."""

    def __init__(self, close: str | None = None, *, whole: bool = False) -> None:
        self._close, self._said, self._pending = close, whole, ""
        self._begins = close is not None
        self._gap = False

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """What is certain with this text: thoughts, and what is said. last: nothing comes behind it."""
        if self._said:
            text = text.lstrip("\n") if self._gap else text
            self._gap = self._gap and not text
            return "", text
        self._pending += text
        if self._close is None:
            start = self._pending.lstrip()
            found = next(((o, c) for o, c in TAGS if start.startswith(o)), None)
            if found is None:
                if not last and any(o.startswith(start) for o, _ in TAGS):
                    return "", ""
                return "", self._rest(self._pending)
            self._close, self._pending, self._begins = found[1], start[len(found[0]) :], True
        if self._begins and (self._pending.strip() or last):
            self._pending, self._begins = self._pending.lstrip(), False
        thought, tag, rest = self._pending.partition(self._close)
        if tag:
            rest = rest.lstrip("\n")
            self._gap = not rest
            return thought.rstrip(), self._rest(rest)
        keep = 0 if last else _kept_back(self._pending, self._close)
        thought, self._pending = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
        return thought, ""

    def _rest(self, text: str) -> str:
        self._said, self._pending = True, ""
        return text


def _kept_back(text: str, tag: str) -> int:
    """How many characters at the end may be the spaces before the tag, or its beginning."""
    for length in range(min(len(tag) - 1, len(text)), -1, -1):
        if text.endswith(tag[:length]):
            return len(text) - len(text[: len(text) - length].rstrip())
    return 0
