"""Ids that only pad a model's vocabulary: they may be drawn, and are no text."""

from __future__ import annotations

import quarrel
from quarrel.llm.texts import VocabularyTexts


def test_ids_beyond_the_vocabulary_are_no_text() -> None:
    tokenizer = quarrel.load_tokenizer("demo")
    texts, beyond = VocabularyTexts(tokenizer), tokenizer.n_vocab
    ids = tokenizer.encode("Once upon", add_special=False)
    decoder = texts.detokenizer()
    padded = [i for id in ids for i in (id, beyond, beyond + 7)]
    assert ("".join(map(decoder.push, padded)) + decoder.flush()).strip() == "Once upon"
    assert texts.token_bytes(beyond) == b""
    assert texts.token_bytes(ids[0])
