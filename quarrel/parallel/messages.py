"""Messages to the members of a group: steps as bare numbers, everything else as JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np

from quarrel.ops.contract import Array
from quarrel.ops.step import SampleInputs, StepInputs, Want

_STEP, _JSON = b"s", b"j"
_WANTS: tuple[Want, ...] = get_args(Want)
_ARRAYS = tuple(f.name for f in fields(StepInputs) if f.name != "sample")
_CONTROLS = tuple(f.name for f in fields(SampleInputs))
_HEAD = struct.Struct(f"<cB{len(_ARRAYS) + 1}i")
"""Kind, what is wanted, the size of each array and the rows that are sampled, -1 for None."""
Message = Mapping[str, Any]
"""A message that is no step: `do` says what it is about."""


def pack(**fields: Any) -> bytes:
    return _JSON + json.dumps(fields).encode()


def pack_step(inputs: StepInputs, want: Want) -> bytes:
    """`StepInputs` and what is wanted, 4 bytes a number."""
    arrays = [getattr(inputs, name) for name in _ARRAYS]
    rows = -1 if inputs.sample is None else len(inputs.out_rows)
    head = _HEAD.pack(_STEP, _WANTS.index(want), *(-1 if a is None else a.size for a in arrays), rows)
    parts = [np.ascontiguousarray(a, np.int32).tobytes() for a in arrays if a is not None]
    if inputs.sample is not None:
        for name in _CONTROLS:
            parts.append(np.ascontiguousarray(getattr(inputs.sample, name), _dtype(name)).tobytes())
    return b"".join([head, *parts])


def unpack(data: bytes) -> Message | tuple[StepInputs, Want]:
    if data[:1] == _JSON:
        return cast(Message, json.loads(data[1:]))
    _, want, *sizes, rows = _HEAD.unpack_from(data)
    at = _HEAD.size
    arrays: dict[str, Array | None] = {}
    for name, size in zip(_ARRAYS, sizes, strict=True):
        arrays[name] = None if size < 0 else np.frombuffer(data, np.int32, size, at)
        at += 4 * max(size, 0)
    sample = None
    if rows >= 0:
        controls: dict[str, Array] = {
            name: np.frombuffer(data, _dtype(name), rows, at + 4 * rows * i) for i, name in enumerate(_CONTROLS)
        }
        sample = SampleInputs(**controls)
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
