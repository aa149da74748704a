"""A program: the flat list of op calls that one forward pass is, before any backend has seen it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quarrel.ops.contract import KVArrays, Op, Operand, Value
from quarrel.ops.kv import KVType, head_bytes


@dataclass(frozen=True)
class Node:
    """One call: `outputs = op(spec, *inputs)`. `path` says where in the model, such as `blk.3.attn`."""

    op: Op
    spec: Any
    inputs: tuple[Operand, ...]
    outputs: tuple[Value, ...]
    path: str = ""


@dataclass(frozen=True)
class KVLayer:
    """What one attention layer keeps per token."""

    n_kv: int
    head_dim: int
    window: int = 0
    """Keys further back than this are never read again; 0 means all are kept."""
    latent: int = 0
    """Width of values that the scores read too (`ops/attention.py`); 0 for values as wide as keys."""

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.latent or self.head_dim

    @property
    def width(self) -> int:
        """Numbers that a token adds, of keys and of values."""
        return self.n_kv * (self.head_dim + self.value_dim)

    def row_bytes(self, type: KVType, own: int) -> int:
        """Bytes that a token adds; `own` are the bytes of a value of the backend's own type."""
        return self.n_kv * sum(head_bytes(type, dim, own) for dim in (self.head_dim, self.value_dim))

    @classmethod
    def of(cls, arrays: KVArrays) -> KVLayer:
        """What keeps such arrays."""
        n_kv, head_dim = arrays.k.shape[2:]
        value_dim = arrays.v.shape[3]
        return cls(n_kv, head_dim, latent=0 if value_dim == head_dim else value_dim)


@dataclass(frozen=True)
class StateLayer:
    """What one recurrent op keeps per sequence, float32: `shape`."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Nodes in order, the step's inputs by name, its results by name, the caches it appends to and the states it keeps."""

    nodes: tuple[Node, ...]
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    caches: tuple[KVLayer, ...]
    states: tuple[StateLayer, ...] = ()
    window: int = 0
    """How far back the layers of `window_groups` read (`ops/windows.py`)."""
    window_groups: int = 0


def needed(nodes: Sequence[Node], wanted: Iterable[Value]) -> list[bool]:
    """For each node whether a step runs it: where a wanted value depends on it, and where its op must always run."""
    wants = {v.id for v in wanted}
    marks: list[bool] = []
    for node in reversed(nodes):
        mark = node.op.always or any(v.id in wants for v in node.outputs)
        if mark:
            wants.update(v.id for v in node.inputs if isinstance(v, Value))
        marks.append(mark)
    return marks[::-1]


STEP_INPUTS: Mapping[str, tuple[str, str]] = {
    "ids": ("i32", "T"),
    "positions": ("i32", "T"),
    "places": ("i32", "T"),
    "see_to": ("i32", "T"),
    "image_rows": ("i32", "T"),
    "slots": ("i32", "T"),
    "query_start": ("i32", "S1"),
    "window_start": ("i32", "S1"),
    "kv_len": ("i32", "S"),
    "block_table": ("i32", "S B"),
    "state_slots": ("i32", "S"),
    "adapter": ("i32", "T"),
    "out_rows": ("i32", "R"),
    "temperature": ("f32", "R"),
    "top_k": ("i32", "R"),
    "top_p": ("f32", "R"),
    "min_p": ("f32", "R"),
    "uniform": ("f32", "R"),
    "stream": ("f32", "T"),
    "per_layer": ("f32", "T"),
    "patches": ("f32", "T"),
    "images": ("f32", "T"),
    "list_end": ("i32", "R"),
    "list_ids": ("i32", "L"),
    "list_counts": ("f32", "L"),
    "list_biases": ("f32", "L"),
    "repetition": ("f32", "R"),
    "presence": ("f32", "R"),
    "frequency": ("f32", "R"),
    "mask_row": ("i32", "R"),
    "masks": ("i32", "M"),
}
"""Every input a step can take, by name: kind and axes. `S1` is S + 1; `stream`, `per_layer`, `patches`, `images`, `places`
and `masks` have a width of the model's own besides, and `images` any number of rows up to T.
`slots` are block * block_size + offset. `slots` and `block_table` may be there once more for each group of layers with a
window: `group_input`."""


def group_input(name: str, group: int) -> str:
    """What `slots` and `block_table` of a group of layers are called; group 0 is of those without a window."""
    return f"{name}.{group}" if group else name
