"""Byte-pair encoding ("gpt2", "gemma4") through the tokenizers library."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from quarrel.tokenizer.guard import native, storable
from quarrel.tokenizer.pre import PreTokenizer
from quarrel.tokenizer.vocab import Kind, TokenizerWarning, Vocabulary

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


class BytePairModel:
    """Merges by rank, leftmost first. Symbols without a token vanish, as in llama.cpp; whole vocabularies have none."""

    def __init__(self, vocabulary: Vocabulary, merges: Iterable[str] | None, rules: PreTokenizer) -> None:
        pairs = _pairs(merges or ())
        table = _table(vocabulary, pairs)
        usable = [pair for pair in pairs if pair[0] in table and pair[1] in table and pair[0] + pair[1] in table]
        _report_lost(vocabulary, pairs, len(usable))
        splits: list[pre_tokenizers.PreTokenizer]
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
        if rules.byte_level:
            splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        with native("the BPE vocabulary cannot be built"):
            model = models.BPE(
                vocab=table, merges=usable, ignore_merges=rules.ignore_merges, byte_fallback=not rules.byte_level
            )
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
        if not rules.byte_level:
            self._tokenizer.normalizer = normalizers.Replace(" ", "▁")

    def encode(self, text: str, after_special: bool) -> list[int]:
        with native(f"a text of {len(text)} characters cannot be split into words; break it into shorter texts", user=True):
            return self._tokenizer.encode(text, add_special_tokens=False).ids


def _pairs(merges: Iterable[str]) -> list[tuple[str, str]]:
    """(left, right) by rank. The first of equal merges counts; the library would take the last."""
    pairs: dict[tuple[str, str], None] = {}
    for merge in merges:
        left, space, right = merge.partition(" ")
        if space and not left:  # of the left piece itself
            left, space, right = merge[1:].partition(" ")
            left = f" {left}"
        if space:
            pairs[left, right] = None
    return list(pairs)


def _table(vocabulary: Vocabulary, pairs: list[tuple[str, str]]) -> dict[str, int]:
    """What text can turn into. Control tokens are not in it, whatever the merges say, and user-defined ones only where
    the merges need them: both are found before the text gets here."""
    if "" not in vocabulary.ids and storable("".join(vocabulary.ids)):
        table = dict(vocabulary.ids)
    else:
        table = {text: id for text, id in vocabulary.ids.items() if storable(text)}
    for id in vocabulary.of_kind(Kind.CONTROL, Kind.UNKNOWN):
        if vocabulary.first(id):
            table.pop(vocabulary.texts[id], None)
    added = [id for id in vocabulary.of_kind(Kind.USER_DEFINED) if len(vocabulary.texts[id]) > 1 and vocabulary.first(id)]
    if added:
        made = {left + right for left, right in pairs}
        for id in added:
            if vocabulary.texts[id] not in made:
                table.pop(vocabulary.texts[id], None)
    if vocabulary.pre_tokenizer is not None and not vocabulary.pre_tokenizer.byte_level:
        # The library makes bytes into the pieces of these names, whatever kind they are.
        for text in [text for text in table if _BYTE_PIECE.fullmatch(text)]:
            if vocabulary.kinds[table[text]] != Kind.BYTE:
                del table[text]
    return table


def _report_lost(vocabulary: Vocabulary, pairs: list[tuple[str, str]], n_usable: int) -> None:
    if n_usable == len(pairs):
        return
    ids = vocabulary.ids
    lost = sum(left not in ids or right not in ids or left + right not in ids for left, right in pairs)
    if lost:
        warnings.warn(
            f"{lost} of {len(pairs)} merges name pieces that are not in the vocabulary and were left out",
            TokenizerWarning,
            stacklevel=4,
        )
