"""Ids to text, as they come: nothing is written before it is whole."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Final, SupportsIndex

from quarrel.tokenizer.vocab import Kind, Vocabulary

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


class PieceBytes:
    """The bytes that an id adds to a text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        rules = vocabulary.pre_tokenizer
        self._alphabet = byte_alphabet() if rules is not None and rules.byte_level else None
        self._known: dict[int, bytes] = {}

    def __call__(self, id: int, special: bool) -> bytes:
        if not special and self._vocabulary.kinds[id] in (Kind.CONTROL, Kind.UNKNOWN):
            return b""
        known = self._known.get(id)
        if known is None:
            known = self._known[id] = self._bytes(self._vocabulary.texts[id], self._vocabulary.kinds[id])
        return known

    def _bytes(self, text: str, kind: int) -> bytes:
        if kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED):
            return text.encode("utf-8", "surrogateescape")
        if kind == Kind.BYTE:
            match = _BYTE_PIECE.fullmatch(text)
            return bytes((int(match[1], 16),)) if match else b""
        if kind != Kind.NORMAL:
            return b""
        if self._alphabet is None:
            return text.replace("▁", " ").encode("utf-8", "surrogateescape")
        codes = [self._alphabet.get(char) for char in text]
        if None in codes:
            return text.encode("utf-8", "surrogateescape")
        return bytes([code for code in codes if code is not None])


class Detokenizer:
    """Turns ids into text one by one: `push(id)` gives the text that became certain, `flush()` the rest.

    Bytes of an unfinished character are held back; bytes that can no longer become one are written as U+FFFD.
    whole: texts of ids that hold whole characters, as nearly all do; filled here, and shared by detokenizers.
    """

    def __init__(self, piece: Callable[[SupportsIndex], bytes], strip_space: bool, whole: dict[int, str]) -> None:
        self._piece = piece
        self._strip_space = strip_space
        self._whole = whole
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._between = not strip_space  # nothing is held back, and no space is to be stripped

    def push(self, id: SupportsIndex) -> str:
        """Raises RequestError for an id outside the vocabulary."""
        alone = id if self._between and isinstance(id, int) else None
        if alone is not None and (known := self._whole.get(alone)) is not None:
            return known
        piece = self._piece(id)
        if piece and self._strip_space:
            self._strip_space = False
            piece = piece.removeprefix(b" ")
        text = self._decoder.decode(piece)
        self._between = not self._strip_space and not self._decoder.getstate()[0]
        if alone is not None and self._between:
            self._whole[alone] = text
        return text

    def flush(self) -> str:
        """Ends the text; the next `push` starts another one, without stripping a space."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._between = not self._strip_space
        return text
