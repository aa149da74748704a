"""WordPiece ("bert") through the tokenizers library.

GGUF stores a piece that starts a word as "\u2581foo" and "##foo" as "foo", so a word is matched with U+2581 in front.
Texts are normalised as llama.cpp does it, which differs from the reference in Hangul and in Indic vowel signs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import chain, islice
from typing import Final

from tokenizers import Tokenizer, models, pre_tokenizers

from quarrel.tokenizer.guard import native, storable
from quarrel.tokenizer.vocab import Kind, Vocabulary

WORD_START: Final = "▁"
_UNKNOWN: Final = " unknown"
# The reference, too, gives up on longer words; matching takes time quadratic in a word's length.
_MAX_WORD: Final = 100
# How many chunks are remembered, of so many characters and ids: some 10 MB of words, 40 MB of anything.
_MOST_KNOWN: Final = 1 << 16
_LONGEST_KNOWN: Final = 32
_MOST_IDS: Final = 8
# How many characters are remembered, some 10 MB of them: more than any language has, a twentieth of Unicode.
_MOST_CHARACTERS: Final = 1 << 16
_CJK: Final = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPieceModel:
    """Greedy longest match inside each word; a word that cannot be matched whole is one unknown token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._words = _WordTable(vocabulary.lowercase, vocabulary.strip_accents)
        self._known: dict[str, tuple[int, ...]] = {}
        hidden = (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)
        table = {text: id for text, id in vocabulary.ids.items() if storable(text) and vocabulary.kinds[id] not in hidden}
        self._unknown = len(vocabulary.texts)
        self._unknown_ids = [] if vocabulary.unk is None else [vocabulary.unk]
        table[_UNKNOWN] = self._unknown
        with native("the WordPiece vocabulary cannot be built"):
            model = models.WordPiece(
                vocab=table,
                unk_token=_UNKNOWN,
                continuing_subword_prefix="",
                max_input_chars_per_word=_MAX_WORD + len(WORD_START),
            )
            self._tokenizer = Tokenizer(model)
            self._tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")

    def encode(self, text: str, after_special: bool) -> list[int]:
        # What is between spaces has the same ids wherever it stands, and most of it was seen before.
        odd = "\x1c" in text or "\x1d" in text or "\x1e" in text or "\x1f" in text  # spaces to str.split, and none here
        chunks = text.split(" ") if odd else text.split()
        try:
            return list(chain.from_iterable(map(self._known.__getitem__, chunks)))
        except KeyError:
            known = {chunk: ids for chunk in chunks if (ids := self._known.get(chunk)) is not None}
        known |= self._fresh([chunk for chunk in dict.fromkeys(chunks) if chunk not in known], len(text))
        return list(chain.from_iterable(map(known.__getitem__, chunks)))

    def _fresh(self, chunks: Sequence[str], length: int) -> dict[str, tuple[int, ...]]:
        """The ids of chunks that are not known, which then are."""
        words: list[str] = []
        ends: list[int] = []
        for chunk in chunks:
            words += [WORD_START + word for word in chunk.translate(self._words).split(" ") if word]
            ends.append(len(words))
        with native(f"a text of {length} characters cannot be tokenized", user=True):
            encoding = self._tokenizer.encode(" ".join(words), add_special_tokens=False)
        of_word: list[list[int]] = [[] for _ in words]
        for id, word in zip(encoding.ids, encoding.word_ids, strict=True):
            assert word is not None  # only what post-processors add is of no word
            of_word[word] += self._unknown_ids if id == self._unknown else (id,)
        begins = [0, *ends[:-1]]
        fresh = {
            chunk: tuple(chain.from_iterable(of_word[begin:end]))
            for chunk, begin, end in zip(chunks, begins, ends, strict=True)
        }
        if len(self._known) + len(fresh) > _MOST_KNOWN:
            self._known.clear()
        short = (item for item in fresh.items() if len(item[0]) <= _LONGEST_KNOWN and len(item[1]) <= _MOST_IDS)
        self._known.update(islice(short, _MOST_KNOWN))
        return fresh


class _WordTable(dict[int, str]):
    """For str.translate: what becomes of each character. Spaces end words; "" drops it. Filled as characters occur."""

    def __init__(self, lowercase: bool, strip_accents: bool) -> None:
        super().__init__()
        self._lowercase, self._strip_accents = lowercase, strip_accents

    def __missing__(self, code: int) -> str:
        if len(self) >= _MOST_CHARACTERS:
            self.clear()
        self[code] = result = self._map(code)
        return result

    def _map(self, code: int) -> str:
        char = chr(code)
        if self._strip_accents:
            # Only the first character of a decomposition, so that of a Hangul syllable the first consonant stays.
            char = unicodedata.normalize("NFD", char)[0]
        category = unicodedata.category(char)
        if char.isspace() and not "\x1c" <= char <= "\x1f":
            return " "
        if char in "\0\ufffd" or category in ("Cc", "Cf", "Cs", "Co"):
            return ""
        if self._strip_accents and category[0] == "M":
            return ""
        # One character each, as Unicode's simple mapping has it: the full one makes two of some.
        text = char.lower()[0] if self._lowercase else char
        alone = category[0] == "P" or (char < "\x7f" and category[0] == "S") or any(a <= ord(char) <= b for a, b in _CJK)
        return f" {text} " if alone else text
