"""What a cache knows of the beginning of a text, in the host's memory or a file: for another day, or another machine.

    SAVED  u32 length of the head  head (JSON)  tokens (int32)  blocks  blocks of windows  states  u32 CRC-32

Little endian; the check sum is of all behind SAVED. How long the parts are follows from the reader's own model and the
number of tokens, never from the file alone.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quarrel.errors import RequestError
from quarrel.ops.transfer import CacheForm

Array = npt.NDArray[Any]
Identity = Mapping[str, str]
"""What makes a model's numbers its own: names of facts (`model`: the digest of its file), and what they are."""
SAVED = b"QUARRELP"
_LONGEST_HEAD, _PIECE, _LONGEST = 1 << 20, 1 << 24, 80
_DAMAGED = "the saved prompt is damaged: save it again"
_WORDS = {"kind": "cache type", "layers": "shape", "states": "shape", "window": "shape", "window_groups": "shape"}
_NUMBER = struct.Struct("<I")


class Reads(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Writes(Protocol):
    def write(self, data: Any, /) -> object: ...


@dataclass(frozen=True, eq=False)
class SavedPrefix:
    """Keys and values of the tokens, and recurrent state behind the last one, as `ops/transfer.py` has them.

    blocks: of all tokens; what lies behind the last one is zero. windows: of the last blocks, one for each group of layers
    with a window, group by group. states: one slot.
    """

    tokens: tuple[int, ...]
    form: CacheForm
    blocks: tuple[Array, ...]
    windows: tuple[Array, ...] = ()
    states: tuple[Array, ...] = ()

    def write(self, file: Writes, identity: Identity, *, check: bool = True) -> int:
        """Writes it to a file or a stream, and returns the bytes. check: False leaves the check sum out, for a stream
        that has its own; who reads it must know."""
        facts = {"identity": dict(identity), "form": asdict(self.form), "tokens": len(self.tokens)}
        head = json.dumps(facts).encode()
        arrays = (np.array(self.tokens, "<i4"), *self.blocks, *self.windows, *self.states)
        crc, total = 0, len(SAVED) + _NUMBER.size
        file.write(SAVED)
        parts = (np.frombuffer(_NUMBER.pack(len(head)) + head, np.uint8), *arrays)
        for data in (np.ascontiguousarray(part).reshape(-1).view(np.uint8).data for part in parts):
            crc, total = zlib.crc32(data, crc) if check else 0, total + len(data)
            file.write(data)
        file.write(_NUMBER.pack(crc))
        return total

    @classmethod
    def read(cls, file: Reads, identity: Identity, form: CacheForm, most: int, *, check: bool = True) -> SavedPrefix:
        """From a file or a stream. most: tokens of it at most. Raises RequestError for what is of another model, of another
        form, too long, cut short or damaged."""
        source = _Source(file, check)
        if source.raw(len(SAVED)) != SAVED:
            raise RequestError("it is no saved prompt of Quarrel's: wanted a file that a slot was saved to")
        source.crc = 0
        (length,) = _NUMBER.unpack(source.raw(_NUMBER.size))
        head = _head(source.raw(length) if length <= _LONGEST_HEAD else b"")
        _check(head, identity, form)
        count = head.get("tokens")
        if not isinstance(count, int) or count < 1:
            raise RequestError(_DAMAGED)
        if count > most:
            raise RequestError(
                f"the saved prompt has {count} tokens, wanted at most {most}: load the model with more context"
            )
        tokens = source.array((count,), "<i4")
        blocks = tuple(source.array(shape, "u1") for shape in form.block_shapes(form.blocks(count)))
        beside = form.window_groups * form.window_blocks(count)
        windows = tuple(source.array(shape, "u1") for shape in (form.block_shapes(beside) if beside else ()))
        states = tuple(source.array(shape, "<f4") for shape in form.state_shapes())
        found = source.crc
        if _NUMBER.unpack(source.raw(_NUMBER.size))[0] != found:
            raise RequestError(_DAMAGED)
        return cls(tuple(tokens.tolist()), form, blocks, windows, states)


class _Source:
    """Parts of a file, and the check sum of what was read."""

    def __init__(self, file: Reads, check: bool) -> None:
        self._file, self._check, self.crc = file, check, 0

    def raw(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            piece = self._file.read(min(size - len(data), _PIECE))
            if not piece:
                raise RequestError("the saved prompt is cut short: save it again")
            data += piece
        self.crc = zlib.crc32(data, self.crc) if self._check else 0
        return data

    def array(self, shape: tuple[int, ...], kind: str) -> Array:
        return np.frombuffer(self.raw(prod(shape) * np.dtype(kind).itemsize), kind).reshape(shape)


def _head(data: bytes | bytearray) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError(_DAMAGED)
    return found


def _check(head: Mapping[str, Any], identity: Identity, form: CacheForm) -> None:
    """Raises RequestError that names the first fact in which the file and this model differ."""
    wanted = {**identity, **json.loads(json.dumps(asdict(form)))}
    given: dict[str, Any] = {}
    for part in ("identity", "form"):
        given |= found if isinstance(found := head.get(part), dict) else {}
    for name in {**wanted, **given}:
        if given.get(name) != wanted.get(name):
            here, there = (_short(values.get(name)) for values in (wanted, given))
            raise RequestError(f"the saved prompt is of another {_WORDS.get(name, name)}: {there}, wanted {here}")


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
