"""Rows that experts' product up leaves where their product down reads them: by expert, in the ring's order of columns.

`ring.py` multiplies both. Between them stands no launch that gathers rows, and down has the items that up has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from quarrel.ops.contract import Value
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP
from quarrel.ops.program import Node
from quarrel.triton_backend.runtime.arrays import Slot

MOST_PAIRS = 1024
"""Pairs of a token and an expert in one launch: rows are kept for so many, and not only while a node runs."""


class Reader(Protocol):
    """The product down."""

    most: int
    """Pairs that it serves."""
    k: int
    """Columns of its rows."""
    padded: int
    """The same as a multiple of 256, zeros behind."""

    def width(self, pairs: int) -> int:
        """Rows of an item."""


class SortedRows:
    """Between the product up of a layer and the one down."""

    def __init__(self) -> None:
        self._reader: Reader | None = None
        self._left = 0

    def read_by(self, reader: Reader, most_items: int, lasting: Callable[[str, int, torch.dtype], Slot]) -> None:
        """`lasting` is a site's."""
        self._reader = reader
        self.rows = lasting("sorted rows", MOST_PAIRS * reader.padded, torch.float16)
        self.items = lasting("sorted items", 1 + 4 * most_items, torch.int32)

    def leave(self, pairs: int, width: int) -> Reader | None:
        """Who reads them, if the product up of so many pairs, in items of this width, shall leave them."""
        reader, self._left = self._reader, 0
        if reader is None or pairs > min(MOST_PAIRS, reader.most) or reader.width(pairs) != width:
            return None
        self._left = pairs
        return reader

    def take(self, pairs: int) -> bool:
        """Whether they have been left."""
        left, self._left = self._left, 0
        return left == pairs


def products_of_a_layer(nodes: Sequence[Node], kept: set[int]) -> list[Value]:
    """What EXPERT_UPs make that one EXPERT_DOWN of the same choice reads and nobody else."""
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for value in {v.id for v in node.inputs if isinstance(v, Value)}:
            readers.setdefault(value, []).append(node)
    found = []
    for up in (node for node in nodes if node.op is EXPERT_UP):
        (y,) = up.outputs
        by = readers.get(y.id, [])
        if len(by) == 1 and by[0].op is EXPERT_DOWN and by[0].inputs[1] is up.inputs[1] and y.id not in kept:
            found.append(y)
    return found
