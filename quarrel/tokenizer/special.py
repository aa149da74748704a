"""Finds special tokens in text, before the model tokenizes what lies between them.

As in llama.cpp the longest token goes first, through the whole text, then the next longest through what is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from quarrel.tokenizer.guard import storable
from quarrel.tokenizer.vocab import Kind, Vocabulary

# A found token is written into the text as four lone surrogates: no text and no token contains any, so nothing matches
# across it, and texts stay strings, which str.replace searches at the speed of C.
_OPEN: Final = "\ud800"
_SEAM: Final = "\udfff"
_DIGITS: Final = "".join(map(chr, range(0xD801, 0xDC00)))
_CODE: Final = re.compile(f"({_OPEN}[\ud801-\udbff]{{3}})")
# isspace() of C.
_SPACE: Final = " \t\n\v\f\r"
_PREFIX_LENGTH: Final = 3
_TAG: Final = re.compile(r"[<\[|].+[>\]|]", re.DOTALL)
_PIPED: Final = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


class Trust(IntEnum):
    """Who wrote a text, and so which tokens may be found in it."""

    CONTENT = 0
    """Anyone. Only user-defined tokens that are no part of a chat's structure, such as runs of spaces."""
    REPLY = 1
    """The model, or a caller who has no chat in mind. All user-defined tokens."""
    TEMPLATE = 2
    """The model's chat template. Control tokens as well."""


@dataclass(frozen=True)
class _Special:
    order: int
    id: int
    text: str
    code: str
    needs: Trust
    tag: bool


class SpecialTokens:
    """All special tokens of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = [
            id
            for id in vocabulary.of_kind(Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
            if storable(vocabulary.texts[id]) and vocabulary.first(id)
        ]
        ids.sort(key=lambda id: (-len(vocabulary.texts[id].encode()), id))
        self._ids = ids
        self._groups: dict[str, list[_Special]] = {}
        self._strips_left, self._strips_right = vocabulary.strips_left, vocabulary.strips_right
        for order, id in enumerate(ids):
            text = vocabulary.texts[id]
            tag = _TAG.fullmatch(text) is not None
            special = _Special(order, id, text, _code(order), _needs(text, vocabulary.kinds[id]), tag)
            self._groups.setdefault(text[:_PREFIX_LENGTH], []).append(special)

    def split(self, spans: Sequence[tuple[str, Trust]], structure: str = "") -> Iterator[str | int]:
        """Texts and ids in turn, no text empty. A token is found only inside one span; the texts between tokens run
        across spans. structure: the chat template; of the tags that it writes, none is found in CONTENT."""
        texts = [text for text, _ in spans]
        if len(texts) == 1 and not any(map(texts[0].__contains__, (*self._groups, _OPEN))):
            yield from filter(None, texts)
            return
        for level in Trust:
            members = [at for at, (_, trust) in enumerate(spans) if trust == level]
            joined = _SEAM.join([texts[at] for at in members])
            for special in self._present(joined):
                forged = level == Trust.CONTENT and special.tag and special.text in structure
                if level >= special.needs and not forged:
                    joined = joined.replace(special.text, special.code)
            for at, text in zip(members, joined.split(_SEAM), strict=False):
                texts[at] = text
        # [text, code, text, code, ..., text]
        parts = _CODE.split("".join(texts))
        orders = [_order(code) for code in parts[1::2]]
        found = [self._ids[at] if at < len(self._ids) else len(self._ids) - at - 1 for at in orders]
        for at, text in enumerate(parts[::2]):
            if at and found[at - 1] in self._strips_right:
                text = text.lstrip(_SPACE)
            if at < len(found) and found[at] in self._strips_left:
                text = text.rstrip(_SPACE)
            if text:
                yield text
            if at < len(found):
                yield found[at]

    def gap(self, number: int) -> str:
        """A text that no other can hold, and which `split` makes -1 - number of: a place for something that is no text."""
        return _code(len(self._ids) + number)

    def _present(self, text: str) -> Iterable[_Special]:
        """Those that may occur, longest first. Most texts hold none of the few beginnings that all tokens share."""
        found = [special for prefix, group in self._groups.items() if prefix in text for special in group]
        return sorted(found, key=lambda special: special.order)


def _needs(text: str, kind: int) -> Trust:
    if kind != Kind.USER_DEFINED:
        return Trust.TEMPLATE
    return Trust.REPLY if _PIPED.fullmatch(text) else Trust.CONTENT


def _code(order: int) -> str:
    base = len(_DIGITS)
    return _OPEN + _DIGITS[order // base // base] + _DIGITS[order // base % base] + _DIGITS[order % base]


def _order(code: str) -> int:
    order = 0
    for digit in code[1:]:
        order = order * len(_DIGITS) + ord(digit) - ord(_DIGITS[0])
    return order
