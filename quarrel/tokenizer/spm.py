"""SentencePiece BPE ("llama") through the sentencepiece library, from a model that is written here from GGUF's keys.

Spaces become U+2581; there is no normalisation and no collapsing of spaces; the adjacent pair whose union is the piece
with the highest score merges first, the leftmost of equals; characters without a piece become bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import sentencepiece

from quarrel.tokenizer.guard import native, storable
from quarrel.tokenizer.vocab import Kind, Vocabulary

SPACE: Final = "▁"
# The library refuses longer ones.
_MAX_PIECE_BYTES: Final = 7999
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_BYTE: Final = int(Kind.BYTE)
_NORMAL: Final = int(Kind.NORMAL)
_SHORT: Final = 118
"""Bytes of a piece that leave every length in a single byte of its message."""
_HIDDEN: Final = frozenset(map(int, (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)))
_KEPT: Final = frozenset(map(int, (Kind.BYTE, Kind.UNUSED)))
_FLOAT: Final = struct.Struct("<f").pack


class SentencePieceModel:
    """Only normal pieces come out of text, and bytes. User-defined ones are found before the text gets here."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._prefix = SPACE if vocabulary.add_space_prefix else ""
        self._unknown = len(vocabulary.texts)
        self._unknown_ids = [] if vocabulary.unk is None else [vocabulary.unk]
        self._processor = sentencepiece.SentencePieceProcessor()
        with native("the SentencePiece vocabulary cannot be built"):
            self._processor.LoadFromSerializedProto(_model_proto(vocabulary))

    def encode(self, text: str, after_special: bool) -> list[int]:
        prefix = self._prefix if after_special else ""
        with native(f"a text of {len(text)} characters cannot be tokenized", user=True):
            ids: list[int] = self._processor.EncodeAsIds(prefix + text.replace(" ", SPACE))
        if self._unknown in ids:
            return [kept for id in ids for kept in (self._unknown_ids if id == self._unknown else (id,))]
        return ids


def _pieces(vocabulary: Vocabulary) -> Iterable[bytes]:
    """Every id in order, then the unknown piece: the library wants exactly one, and files have none, one or several."""
    # Of a quarter of a million pieces nearly all are written by one expression, which took six times as long in functions.
    sound = len(vocabulary.ids) == len(vocabulary.texts) and storable("".join(vocabulary.texts))
    for id, (text, score, kind) in enumerate(zip(vocabulary.texts, vocabulary.scores, vocabulary.kinds, strict=True)):
        if sound and kind == _NORMAL and 0 < len(piece := text.encode()) <= _SHORT:
            yield b"\x0a%c\x0a%c%b\x15%b\x18\x01" % (len(piece) + 9, len(piece), piece, _FLOAT(score))
            continue
        piece = b"" if kind in _HIDDEN or not storable(text) or not vocabulary.first(id) else text.encode()
        bad_byte = kind == _BYTE and _BYTE_PIECE.fullmatch(text) is None
        if bad_byte or not 0 < len(piece) <= _MAX_PIECE_BYTES:
            # Text can never match this: its spaces have become U+2581 before.
            yield _piece(b" %d" % id, score, Kind.CONTROL)
        else:
            yield _piece(piece, score, kind if kind in _KEPT else Kind.NORMAL)
    yield _piece(b" unknown", 0.0, Kind.UNKNOWN)


def _piece(text: bytes, score: float, kind: int) -> bytes:
    """ModelProto.pieces: text, score and type."""
    content = b"\x0a%b%b\x15%b\x18%c" % (_varint(len(text)), text, _FLOAT(score), kind)
    return b"\x0a%b%b" % (_varint(len(content)), content)


def _model_proto(vocabulary: Vocabulary) -> bytes:
    """A sentencepiece.ModelProto (fields of sentencepiece_model.proto), written by hand: no protobuf needed."""
    texts, bytes_ = vocabulary.texts, vocabulary.of_kind(Kind.BYTE)
    n_bytes = len({texts[id] for id in bytes_ if _BYTE_PIECE.fullmatch(texts[id])})
    trainer = _integer(3, 2) + _integer(35, n_bytes == 256)  # model_type = BPE, byte_fallback
    # name, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces
    normalizer = _message(1, b"identity") + _integer(3, 0) + _integer(4, 0) + _integer(5, 0)
    return b"".join(_pieces(vocabulary)) + _message(2, trainer) + _message(3, normalizer)


@lru_cache(1024)
def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
