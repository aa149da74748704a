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
_DIGITS: Final = "".join(map(chr, range(0xD801, 0xDC00)))
_CODE: Final = re.compile(f"{_OPEN}[\ud801-\udbff]{{3}}")
# isspace() of C.
_SPACE: Final = r"[ \t\n\v\f\r]+"
_PREFIX_LENGTH: Final = 3
_TAG: Final = re.compile(r"[<\[|].+[>\]|]", re.DOTALL)
_PIPED: Final = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


class Trust(IntEnum):
    """Who wrote a text, and so which tokens may be found in it."""

    CONTENT = 0
    """Anyone. Only user-defined tokens that are no tags of a chat template, such as runs of spaces."""
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


class SpecialTokens:
    """All special tokens of a vocabulary. `structure`: the text of the chat templates; what stands there is structure."""

    def __init__(self, vocabulary: Vocabulary, structure: str) -> None:
        ids = [
            id
            for id in vocabulary.of_kind(Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
            if storable(vocabulary.texts[id]) and vocabulary.first(id)
        ]
        ids.sort(key=lambda id: (-len(vocabulary.texts[id].encode()), id))
        self._ids = ids
        self._groups: dict[str, list[_Special]] = {}
        strip_left, strip_right = [], []
        for order, id in enumerate(ids):
            text = vocabulary.texts[id]
            special = _Special(order, id, text, _code(order), _needs(text, vocabulary.kinds[id], structure))
            self._groups.setdefault(text[:_PREFIX_LENGTH], []).append(special)
            if id in vocabulary.strips_left:
                strip_left.append(special.code)
            if id in vocabulary.strips_right:
                strip_right.append(special.code)
        self._left = re.compile(f"{_SPACE}(?=({'|'.join(strip_left)}))") if strip_left else None
        self._right = re.compile(f"({'|'.join(strip_right)}){_SPACE}") if strip_right else None

    def split(self, spans: Sequence[tuple[str, Trust]]) -> Iterator[str | int]:
        """Texts and ids in turn, no text empty. A token is found only inside a run of spans of equal trust; the texts
        between tokens run across spans."""
        texts = [text for text, _ in spans]
        for special in self._present("".join(texts)):
            for at, (_, trust) in enumerate(spans):
                if trust >= special.needs and special.text in texts[at]:
                    texts[at] = texts[at].replace(special.text, special.code)
        whole = "".join(texts)
        if self._left is not None:
            whole = self._left.sub("", whole)
        if self._right is not None:
            whole = self._right.sub(r"\1", whole)
        at = 0
        for match in _CODE.finditer(whole):
            if at < match.start():
                yield whole[at : match.start()]
            yield self._ids[_order(match.group())]
            at = match.end()
        if at < len(whole):
            yield whole[at:]

    def _present(self, text: str) -> Iterable[_Special]:
        """Those that may occur, longest first. Most texts hold none of the few beginnings that all tokens share."""
        found = [special for prefix, group in self._groups.items() if prefix in text for special in group]
        return sorted(found, key=lambda special: special.order)


def _needs(text: str, kind: int, structure: str) -> Trust:
    if kind != Kind.USER_DEFINED:
        return Trust.TEMPLATE
    if _PIPED.fullmatch(text) or (_TAG.fullmatch(text) and text in structure):
        return Trust.REPLY
    return Trust.CONTENT


def _code(order: int) -> str:
    base = len(_DIGITS)
    return _OPEN + _DIGITS[order // base // base] + _DIGITS[order // base % base] + _DIGITS[order % base]


def _order(code: str) -> int:
    order = 0
    for digit in code[1:]:
        order = order * len(_DIGITS) + _DIGITS.index(digit)
    return order
