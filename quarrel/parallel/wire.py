"""What goes between the first process and the others: a length, then bytes. Steps as bare numbers, the rest as JSON."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np

from quarrel.ops.contract import Array
from quarrel.ops.step import SampleInputs, StepInputs, Want

_LENGTH = struct.Struct("<I")
_STEP = b"s"
_WORDS = b"w"
_WANTS: tuple[Want, ...] = get_args(Want)
_INTS = tuple(f.name for f in fields(StepInputs) if f.name != "sample")
_SAMPLE = ("temperature", "top_k", "top_p", "min_p", "uniform")
_HEAD = struct.Struct(f"<cB{len(_INTS) + 1}i")
Words = Mapping[str, Any]
"""A message that is no step: `do` says what it is about."""


def send(link: socket.socket, message: bytes) -> None:
    """Raises OSError when the other side is gone."""
    link.sendall(_LENGTH.pack(len(message)) + message)


def receive(link: socket.socket) -> bytes | None:
    """The next message, or None when the other side is gone."""
    head = _exactly(link, _LENGTH.size)
    return None if head is None else _exactly(link, _LENGTH.unpack(head)[0])


def words(**said: Any) -> bytes:
    return _WORDS + json.dumps(said).encode()


def step(inputs: StepInputs, want: Want) -> bytes:
    """`StepInputs` and what is wanted, 4 bytes a number."""
    arrays = [getattr(inputs, name) for name in _INTS]
    rows = -1 if inputs.sample is None else len(inputs.out_rows)
    head = _HEAD.pack(_STEP, _WANTS.index(want), *(-1 if a is None else a.size for a in arrays), rows)
    parts = [np.ascontiguousarray(a, np.int32).tobytes() for a in arrays if a is not None]
    if inputs.sample is not None:
        for name in _SAMPLE:
            parts.append(np.ascontiguousarray(getattr(inputs.sample, name), _dtype(name)).tobytes())
    return b"".join([head, *parts])


def parse(message: bytes) -> Words | tuple[StepInputs, Want]:
    if message[:1] == _WORDS:
        return cast(Words, json.loads(message[1:]))
    _, want, *sizes, rows = _HEAD.unpack_from(message)
    at = _HEAD.size
    arrays: dict[str, Array | None] = {}
    for name, size in zip(_INTS, sizes, strict=True):
        arrays[name] = None if size < 0 else np.frombuffer(message, np.int32, size, at)
        at += 4 * max(size, 0)
    sample = None
    if rows >= 0:
        drawn: dict[str, Array] = {
            name: np.frombuffer(message, _dtype(name), rows, at + 4 * rows * i) for i, name in enumerate(_SAMPLE)
        }
        sample = SampleInputs(**drawn)
    table, lengths = arrays["block_table"], arrays["kv_len"]
    assert table is not None
    assert lengths is not None
    arrays["block_table"] = table = table.reshape(len(lengths), -1)
    slots, tables = arrays["window_slots"], arrays["window_tables"]
    if slots is not None and tables is not None:
        arrays["window_tables"] = tables = tables.reshape(-1, *table.shape)
        arrays["window_slots"] = slots.reshape(len(tables), -1)
    return StepInputs(**arrays, sample=sample), _WANTS[want]  # type: ignore[arg-type]


def _dtype(name: str) -> type:
    return np.int32 if name == "top_k" else np.float32


def _exactly(link: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            got = link.recv(min(size - len(parts), 1 << 20))
        except OSError:
            return None
        if not got:
            return None
        parts += got
    return bytes(parts)
