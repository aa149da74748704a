"""DRY ("don't repeat yourself"): a penalty on the token that would carry a repetition on.

    length   for every earlier place whose next token is t: how many tokens before that place equal the last tokens of
             the text, counted back to the nearest sequence breaker; the longest such place counts for t
    penalty  multiplier * base ** (length - allowed_length), where length >= allowed_length

A token with which a breaker text ends is never penalised and never part of a repetition. Breakers are found in bytes,
so one may span tokens. Source: p-e-w's description in oobabooga/text-generation-webui #5677.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_PENALTY = 1e30


class Dry:
    """The penalty of one sequence; follows its tokens as they come."""

    def __init__(
        self,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Sequence[str],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._multiplier, self._base, self._allowed, self._last_n = multiplier, base, allowed_length, last_n
        self._breakers = [text.encode() for text in breakers]
        self._token_bytes = token_bytes
        self._tail = b""
        self._breaks: list[bool] = []
        # Past this many tokens the penalty grows no more, so there is nothing to count.
        steps = math.log(MAX_PENALTY / multiplier) / math.log(base) if base > 1.0 else 1.0
        self._longest = allowed_length + int(min(steps, 1e9)) + 1

    def penalties(self, tokens: Sequence[int]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Token ids and what to subtract from their logits; `tokens` is the text so far, prompt included."""
        self._follow(tokens)
        first = 0 if self._last_n < 0 else max(0, len(tokens) - self._last_n)
        text = np.array(tokens[first:], np.int64)
        breaks = np.array(self._breaks[first:], bool)
        longest = self._lengths(text, breaks)
        ids = np.array(sorted(t for t, n in longest.items() if n >= self._allowed), np.int64)
        grown = np.array([min(longest[int(t)] - self._allowed, self._longest) for t in ids], np.float64)
        return ids, np.minimum(self._multiplier * np.power(self._base, grown), MAX_PENALTY)

    def _lengths(self, text: npt.NDArray[Any], breaks: npt.NDArray[Any]) -> dict[int, int]:
        """The longest repetition that each possible next token would carry on."""
        longest: dict[int, int] = {}
        at = np.flatnonzero(~breaks[1:]) if len(text) else np.empty(0, np.int64)  # places whose next token is no breaker
        for length in range(min(len(text), self._longest)):
            if breaks[-1 - length]:
                break
            at = at[at >= length]
            at = at[text[at - length] == text[-1 - length]]
            if not len(at):
                break
            longest.update(dict.fromkeys(text[at + 1].tolist(), length + 1))
        return longest

    def _follow(self, tokens: Sequence[int]) -> None:
        keep = max((len(b) for b in self._breakers), default=1) - 1
        for token in tokens[len(self._breaks) :]:
            piece = self._token_bytes(token)
            self._breaks.append(any(self._ends_in(breaker, piece) for breaker in self._breakers))
            self._tail = (self._tail + piece)[-keep:] if keep else b""

    def _ends_in(self, breaker: bytes, piece: bytes) -> bool:
        before = self._tail[len(self._tail) - (len(breaker) - 1) :] if len(breaker) <= len(self._tail) else self._tail
        return breaker in before + piece
