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
_LONGEST_HEAD, _PIECE, _LONGEST, _ALIGN = 1 << 20, 1 << 24, 80, 64
_DAMAGED = "the saved prompt is damaged: save it again"
_WORDS = {"kind": "cache type", "layers": "shape", "states": "shape", "window": "shape", "window_groups": "shape"}
_NUMBER = struct.Struct("<I")


class Reads(Protocol):
    def readinto(self, buffer: Any, /) -> int | None: ...


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
        head = _head_of(len(self.tokens), self.form, identity)
        arrays = (np.array(self.tokens, "<i4"), *self.blocks, *self.windows, *self.states)
        crc, total = 0, len(SAVED) + _NUMBER.size
        file.write(SAVED)
        parts = (np.frombuffer(head[len(SAVED) :], np.uint8), *arrays)
        for data in (np.ascontiguousarray(part).reshape(-1).view(np.uint8).data for part in parts):
            crc, total = zlib.crc32(data, crc) if check else 0, total + len(data)
            file.write(data)
        file.write(_NUMBER.pack(crc))
        return total

    @classmethod
    def within(cls, memory: Array, tokens: tuple[int, ...], form: CacheForm, identity: Identity) -> SavedPrefix | None:
        """One whose arrays lie in this memory, as `write` without a check sum would put them there: its head and tokens are
        written, the rest is the caller's to fill. None where there is no room."""
        if len(memory) < room(len(tokens), form, identity):
            return None
        at = 0

        def part(size: int) -> Array:
            nonlocal at
            at += size
            return memory[at - size : at]

        for data in (_head_of(len(tokens), form, identity), np.array(tokens, "<i4").tobytes()):
            part(len(data))[:] = np.frombuffer(data, np.uint8)
        blocks, windows, states = (
            tuple(part(prod(shape) * np.dtype(kind).itemsize).view(kind).reshape(shape) for shape in shapes)
            for shapes, kind in _parts(len(tokens), form)
        )
        part(_NUMBER.size)[:] = 0
        return cls(tokens, form, blocks, windows, states)

    @classmethod
    def read(
        cls, file: Reads | Array, identity: Identity, form: CacheForm, most: int, *, check: bool = True
    ) -> SavedPrefix:
        """From a file, or memory, where its arrays stay. most: tokens of it at most. Raises RequestError for what is of
        another model, of another form, too long, cut short or damaged."""
        source = _Source(file, check)
        if source.raw(len(SAVED)).tobytes() != SAVED:
            raise RequestError("it is no saved prompt of Quarrel's: wanted a file that a slot was saved to")
        source.crc = 0
        (length,) = _NUMBER.unpack(source.raw(_NUMBER.size).data)
        head = _head(source.raw(length).tobytes() if length <= _LONGEST_HEAD else b"")
        _check(head, identity, form)
        count = head.get("tokens")
        if not isinstance(count, int) or count < 1:
            raise RequestError(_DAMAGED)
        if count > most:
            raise RequestError(
                f"the saved prompt has {count} tokens, wanted at most {most}: load the model with more context"
            )
        tokens = source.array((count,), "<i4")
        blocks, windows, states = (
            tuple(source.array(shape, kind) for shape in shapes) for shapes, kind in _parts(count, form)
        )
        found = source.crc
        if _NUMBER.unpack(source.raw(_NUMBER.size).data)[0] != found:
            raise RequestError(_DAMAGED)
        return cls(tuple(tokens.tolist()), form, blocks, windows, states)


def room(tokens: int, form: CacheForm, identity: Identity) -> int:
    """Bytes that so many tokens take, without a check sum."""
    shapes = ((prod(shape) * np.dtype(kind).itemsize for shape in shapes) for shapes, kind in _parts(tokens, form))
    return len(_head_of(tokens, form, identity)) + 4 * tokens + sum(map(sum, shapes)) + _NUMBER.size


class _Source:
    """Parts of a file, and the check sum of what was read."""

    def __init__(self, file: Reads | Array, check: bool) -> None:
        self._file, self._check, self.crc = file, check, 0

    def raw(self, size: int) -> Array:
        if isinstance(self._file, np.ndarray):
            data, self._file = self._file[:size], self._file[size:]
            at = len(data)
        else:
            data, at = np.empty(size, np.uint8), 0
            while at < size and (count := self._file.readinto(data[at : at + _PIECE].data)):
                at += count
        if at < size:
            raise RequestError("the saved prompt is cut short: save it again")
        self.crc = zlib.crc32(data.data, self.crc) if self._check else 0
        return data

    def array(self, shape: tuple[int, ...], kind: str) -> Array:
        return self.raw(prod(shape) * np.dtype(kind).itemsize).view(kind).reshape(shape)


def _head_of(tokens: int, form: CacheForm, identity: Identity) -> bytes:
    """What comes before the tokens, so long that the blocks behind them lie at a multiple of _ALIGN."""
    facts = {"identity": dict(identity), "form": asdict(form), "tokens": tokens}
    head = json.dumps(facts).encode()
    head += b" " * (-(len(SAVED) + _NUMBER.size + len(head) + 4 * tokens) % _ALIGN)
    return SAVED + _NUMBER.pack(len(head)) + head


def _parts(tokens: int, form: CacheForm) -> tuple[tuple[list[tuple[int, ...]], str], ...]:
    """Shapes, and of what, of the arrays of so many tokens: blocks, those of windows, states."""
    beside = form.window_groups * form.window_blocks(tokens)
    blocks, windows = form.block_shapes(form.blocks(tokens)), form.block_shapes(beside) if beside else []
    return (blocks, "u1"), (windows, "u1"), (form.state_shapes(), "<f4")


def _head(data: bytes) -> dict[str, Any]:
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
