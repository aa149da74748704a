"""Unigram ("t5") through the tokenizers library: the split of a text with the highest sum of scores."""

from __future__ import annotations

from tokenizers import Tokenizer, models

from quarrel.tokenizer.charsmap import CharsMap
from quarrel.tokenizer.guard import native, storable
from quarrel.tokenizer.vocab import Kind, Vocabulary

SPACE = "▁"


class UnigramModel:
    """Characters that no piece covers become the unknown token, one for each run of them."""

    def __init__(self, vocabulary: Vocabulary, charsmap: CharsMap) -> None:
        self._charsmap = charsmap
        self._collapse = vocabulary.remove_extra_whitespaces
        self._prefix = vocabulary.add_space_prefix
        self._unknown = len(vocabulary.texts)
        self._unknown_ids = [] if vocabulary.unk is None else [vocabulary.unk]
        with native("the Unigram vocabulary cannot be built"):
            model = models.Unigram(vocab=_pieces(vocabulary), unk_id=self._unknown, byte_fallback=False)
            self._tokenizer = Tokenizer(model)

    def encode(self, text: str, after_special: bool) -> list[int]:
        marked = self._escape(self._charsmap.apply(text))
        with native(f"a text of {len(text)} characters cannot be tokenized", user=True):
            ids = self._tokenizer.encode(marked, add_special_tokens=False).ids
        if self._unknown in ids:
            return [kept for id in ids for kept in (self._unknown_ids if id == self._unknown else (id,))]
        return ids

    def _escape(self, text: str) -> str:
        if self._collapse:
            return "".join([SPACE + word for word in text.split(" ") if word])
        body = text.lstrip(" ")
        prefix = SPACE if self._prefix and body else ""
        return SPACE * (len(text) - len(body)) + prefix + body.replace(" ", SPACE)


def _pieces(vocabulary: Vocabulary) -> list[tuple[str, float]]:
    """Every id in order, then the unknown piece. The library needs all of them, and matches any of them: what must not
    come out of text gets a name with a space in it, which has become U+2581 in every text."""
    lowest = min((vocabulary.scores[id] for id in vocabulary.of_kind(Kind.NORMAL)), default=0.0)
    pieces = []
    for id, (text, score, kind) in enumerate(zip(vocabulary.texts, vocabulary.scores, vocabulary.kinds, strict=True)):
        usable = kind in (Kind.NORMAL, Kind.UNUSED) and storable(text) and vocabulary.first(id)
        # The score of an unknown character is derived from the lowest score of all.
        pieces.append((text, max(score, lowest)) if usable else (f" {id}", lowest))
    return [*pieces, (" unknown", lowest)]
