"""A tokenizer for the engine: defined for all of a model's ids, also those that only pad the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from quarrel.engine import Detokenizer
from quarrel.tokenizer import Tokenizer


@dataclass(frozen=True)
class VocabularyTexts:
    """`continues`: generated text continues the prompt's, so that a first space belongs to it. `names`: control tokens that
    are written by their names."""

    tokenizer: Tokenizer
    continues: bool = True
    names: frozenset[int] = frozenset()

    def detokenizer(self) -> Detokenizer:
        return _Padded(self.tokenizer.detokenizer(continues=self.continues, names=self.names), self.tokenizer.n_vocab)

    def token_bytes(self, id: int) -> bytes:
        return self.tokenizer.token_bytes(id) if id < self.tokenizer.n_vocab else b""


class _Padded:
    """Ids beyond the vocabulary, which a model's padded output layer could draw, are no text."""

    def __init__(self, detokenizer: Detokenizer, n_vocab: int) -> None:
        self._detokenizer, self._n_vocab = detokenizer, n_vocab

    def push(self, id: int) -> str:
        return self._detokenizer.push(id) if id < self._n_vocab else ""

    def flush(self) -> str:
        return self._detokenizer.flush()
