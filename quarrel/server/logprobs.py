"""Log probabilities in OpenAI's two forms: an object a token (chat), and lists side by side (completions)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quarrel.engine import TokenLogprob
from quarrel.llm import Model

Json = dict[str, Any]
LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


def chat_logprob(entry: TokenLogprob, llm: Model) -> Json:
    """One token with its alternatives, each with the bytes that it adds to the text, its leading space among them."""
    top = [_token(id, value, llm) for id, value in entry.top]
    return {**_token(entry.token_id, entry.logprob, llm), "top_logprobs": top}


class LogprobLists:
    """The lists of one choice, as its tokens come. A token's offset is where it begins in the choice's text."""

    def __init__(self, llm: Model) -> None:
        self._llm, self._at = llm, 0
        self._detokenizer = llm.tokenizer.detokenizer(continues=True)

    def prompt(self, tokens: Sequence[int], entries: Sequence[TokenLogprob], text: str) -> Json:
        """Of a prompt that the choice's text begins with, as `text`. Nothing comes before its first token: null."""
        self._detokenizer = self._llm.tokenizer.detokenizer()
        made = self._lists([(tokens[0], None), *((e.token_id, e) for e in entries)])
        self._detokenizer = self._llm.tokenizer.detokenizer(continues=True)
        self._at = len(text)
        return made

    def answer(self, entries: Sequence[TokenLogprob]) -> Json:
        """Of further tokens."""
        return self._lists([(e.token_id, e) for e in entries])

    def _lists(self, rows: Sequence[tuple[int, TokenLogprob | None]]) -> Json:
        offsets = []
        for id, _ in rows:
            offsets.append(self._at)
            if id < self._llm.tokenizer.n_vocab:
                self._at += len(self._detokenizer.push(id))
        return {
            "tokens": [_text(id, self._llm) for id, _ in rows],
            "token_logprobs": [None if e is None else max(e.logprob, LEAST) for _, e in rows],
            "top_logprobs": [None if e is None else self._top(e) for _, e in rows],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """By text, the token itself among them; of two that look the same the likelier one."""
        rows = {**dict(entry.top), entry.token_id: entry.logprob}
        likelier_last = sorted(rows.items(), key=lambda row: row[1])
        made = {_text(id, self._llm): max(value, LEAST) for id, value in likelier_last}
        return dict(reversed(made.items()))


def joined(first: Json, second: Json) -> Json:
    return {name: [*first[name], *second[name]] for name in first}


def _token(id: int, logprob: float, llm: Model) -> Json:
    raw = _bytes(id, llm)
    return {"token": _text(id, llm), "logprob": max(logprob, LEAST), "bytes": list(raw)}


def _text(id: int, llm: Model) -> str:
    """A token that is no whole character is shown by its bytes, as OpenAI does, so that no two look the same."""
    raw = _bytes(id, llm)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _bytes(id: int, llm: Model) -> bytes:
    """None for what a wider output layer has beyond the vocabulary."""
    return llm.tokenizer.token_bytes(id, special=True) if id < llm.tokenizer.n_vocab else b""
