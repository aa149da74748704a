"""Messages to the members of a group: steps as bare numbers, everything else as JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np

from quarrel.ops.contract import Array
from quarrel.ops.program import STEP_INPUTS
from quarrel.ops.step import LIST_INPUTS, Lists, Masks, SampleInputs, StepInputs, Want

_STEP, _JSON = b"s", b"j"
_WANTS: tuple[Want, ...] = get_args(Want)
_ARRAYS = tuple(f.name for f in fields(StepInputs) if f.name != "sample")
_CONTROLS = tuple(f.name for f in fields(SampleInputs) if f.name not in ("lists", "masks"))
_HEAD = struct.Struct(f"<cB{len(_ARRAYS) + 4}i")
"""Kind, what is wanted, the size of each array, the rows that are sampled, the entries of their lists, their masks, -1 for
None, and the words of each."""
Message = Mapping[str, Any]
"""A message that is no step: `do` says what it is about."""


def pack(**fields: Any) -> bytes:
    return _JSON + json.dumps(fields).encode()


def pack_step(inputs: StepInputs, want: Want) -> bytes:
    """`StepInputs` and what is wanted, 4 bytes a number."""
    arrays = [inputs.named(name) for name in _ARRAYS]
    rows = -1 if inputs.sample is None else len(inputs.out_rows)
    lists = None if inputs.sample is None else inputs.sample.lists
    entries = -1 if lists is None else len(lists.list_ids)
    masks = None if inputs.sample is None else inputs.sample.masks
    sizes = [-1 if a is None else a.size for a in arrays]
    head = _HEAD.pack(_STEP, _WANTS.index(want), *sizes, rows, entries, *((-1, 0) if masks is None else masks.masks.shape))
    parts = [np.ascontiguousarray(a, np.int32).tobytes() for a in arrays if a is not None]
    if inputs.sample is not None:
        for name in _CONTROLS:
            parts.append(np.ascontiguousarray(getattr(inputs.sample, name), _dtype(name)).tobytes())
        for name in LIST_INPUTS if lists else ():
            parts.append(np.ascontiguousarray(getattr(lists, name), _dtype(name)).tobytes())
        if masks is not None:
            parts += [np.ascontiguousarray(array, np.int32).tobytes() for array in (masks.mask_row, masks.masks)]
    return b"".join([head, *parts])


def unpack(data: bytes) -> Message | tuple[StepInputs, Want]:
    if data[:1] == _JSON:
        return cast(Message, json.loads(data[1:]))
    _, want, *sizes, rows, entries, count, words = _HEAD.unpack_from(data)
    at = _HEAD.size
    arrays: dict[str, Array | None] = {}
    for name, size in zip(_ARRAYS, sizes, strict=True):
        arrays[name] = None if size < 0 else np.frombuffer(data, np.int32, size, at)
        at += 4 * max(size, 0)
    sample = None
    if rows >= 0:
        lengths = dict.fromkeys(_CONTROLS, rows)
        if entries >= 0:
            lengths |= {name: entries if STEP_INPUTS[name][1] == "L" else rows for name in LIST_INPUTS}
        controls: dict[str, Array] = {}
        for name, length in lengths.items():
            controls[name] = np.frombuffer(data, _dtype(name), length, at)
            at += 4 * length
        lists = Lists(**{name: controls.pop(name) for name in LIST_INPUTS}) if entries >= 0 else None
        masks = None
        if count >= 0:
            numbers = np.frombuffer(data, np.int32, rows + count * words, at)
            masks = Masks(numbers[:rows], numbers[rows:].reshape(count, words))
        sample = SampleInputs(**controls, lists=lists, masks=masks)
    table, kv_len = arrays["block_table"], arrays["kv_len"]
    assert table is not None
    assert kv_len is not None
    arrays["block_table"] = table = table.reshape(len(kv_len), -1)
    slots, tables = arrays["window_slots"], arrays["window_tables"]
    if slots is not None and tables is not None:
        arrays["window_tables"] = tables = tables.reshape(-1, *table.shape)
        arrays["window_slots"] = slots.reshape(len(tables), -1)
    return StepInputs(**arrays, sample=sample), _WANTS[want]  # type: ignore[arg-type]


def _dtype(name: str) -> type:
    return np.int32 if STEP_INPUTS[name][0] == "i32" else np.float32
