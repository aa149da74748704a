"""How long a model may think: where a thought has had as many tokens as a request allows, its end is drawn for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from quarrel.engine import MakeGuide
from quarrel.tokenizer import Tokenizer

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)
"""What thoughts stand between, at the beginning of an answer."""
HARMONY = ("<|channel|>analysis<|message|>", "<|end|>")
_ANSWER = "<|start|>assistant<|channel|>final<|message|>"
"""What follows a thought in gpt-oss' channels."""
_TAIL = 16
"""Tokens of a prompt that an opening tag and the space behind it take at most."""


def opened_by(detokenize: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> str | None:
    """The tag that closes what the prompt, by its template, has opened. detokenize: with control tokens."""
    end = detokenize(tokens[-_TAIL:]).rstrip()
    return next((close for open, close in TAGS if end.endswith(open)), None)


def thinking_guide(tokenizer: Tokenizer, n_vocab: int, prompt: Sequence[int], budget: int) -> MakeGuide:
    """Of answers to a prompt whose thoughts have at most so many tokens."""
    close = opened_by(lambda ids: tokenizer.decode(ids, skip_special=False), prompt)
    return lambda: _Guide(tokenizer, n_vocab, budget, close)


class _Guide:
    """Allows everything but in the places of a thought's forced end."""

    ends: frozenset[int] = frozenset()

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, budget: int, close: str | None) -> None:
        self._tokenizer, self._left, self._close = tokenizer, budget, close
        self._text, self._said = b"", False
        self._forced: list[int] = []
        self._all, self._one = np.ones(n_vocab, bool), np.zeros(n_vocab, bool)
        if close is not None:
            self._spend(0)

    def allowed(self) -> npt.NDArray[np.bool_]:
        if not self._forced:
            return self._all
        self._one[:] = False
        self._one[self._forced[0]] = True
        return self._one

    def take(self, token: int) -> bool:
        if self._forced:
            del self._forced[0]
            self._said = not self._forced
        elif not self._said:
            self._text += self._tokenizer.token_bytes(token, special=True)
            self._begin() if self._close is None else self._spend(1)
        return False

    def _begin(self) -> None:
        start, pairs = self._text.lstrip(), (*TAGS, HARMONY)
        found = next(((o, c) for o, c in pairs if start.startswith(o.encode())), None)
        if found is not None:
            self._close, self._text = found[1], start[len(found[0].encode()) :]
            self._spend(0)
        else:
            self._said = not any(o.encode().startswith(start) for o, _ in pairs)

    def _spend(self, tokens: int) -> None:
        assert self._close is not None
        close = self._close.encode()
        self._left, self._said = self._left - tokens, close in self._text
        self._text = self._text[-2 * len(close) - 64 :]
        # A closing tag that has begun may end by itself, or not be one: the next token says.
        begun = any(self._text.endswith(close[:n]) for n in range(1, len(close)))
        if not self._said and self._left <= 0 and not begun:
            self._forced = self._tokenizer.encode(self._close + self._behind(), False, parse_special=True)

    def _behind(self) -> str:
        return _ANSWER if self._close == HARMONY[1] else "\n\n"
