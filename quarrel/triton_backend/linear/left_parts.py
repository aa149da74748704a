"""What a map onto the residual stream leaves to the norm behind it: sums that the norm's launch adds to the stream.

The ring (`ring.py`) cuts K, so that a few rows keep the device busy, and leaves float32 sums of each part; experts leave a
row for each that a token has chosen. Where a norm is the first to read the stream that they belong to, its launch adds
them, in order, and writes the stream: a launch less, and the stream is read once less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import triton
import triton.language as tl

from quarrel.ops.contract import Value
from quarrel.ops.linear import ADD, LINEAR_ADD, NORM_GATE_UP, NORM_LINEAR
from quarrel.ops.moe import EXPERT_DOWN
from quarrel.ops.norm import NORM
from quarrel.ops.program import Node

LEAST_ROWS, MOST_ROWS = 64, 128
"""Rows for which parts are left. A norm has a program to a row, so few rows with many parts keep few multiprocessors busy:
on an H200 steps of 128 sequences of Mistral-7B take 5.63 ms for 5.90, of 8 and 32 no less, and six layers of gpt-oss with
32 sequences 1,353 us for 1,331."""
Kind = Literal["", "parts", "biased", "shares"]
"""Of what is left: nothing, parts of K without a bias and with one, rows of experts with their shares."""


class Parts(NamedTuple):
    """Sums of a stream of K columns, and what makes it of them: residual + alpha * (their sum + bias), or the sum of rows
    that are each multiplied with a share."""

    sums: Any  # float32 [parts, rows, K], `stride` values apart; of experts [rows, parts, K]
    more: Any  # float32: a bias [K], or shares [rows, parts]; else not read
    residual: Any  # float32 [rows, K]
    stride: int
    alpha: float


def leaves(rows: int) -> bool:
    """Whether a norm adds what belongs to so many rows."""
    return LEAST_ROWS <= rows <= MOST_ROWS


class LeftParts:
    """Between one map and the norm behind it: what the map left in this step, if anything."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing is left."""
        self._parts: Parts | None = None
        self._kind: Kind = ""
        self._count, self._add = 0, _nothing

    def leave(self, parts: Parts, kind: Kind, count: int, add: Callable[[], None]) -> None:
        """So many parts; `add` launches what writes the stream by itself."""
        self._parts, self._kind, self._count, self._add = parts, kind, count, add

    def take(self, x: Any, fits: bool = True) -> tuple[Parts, dict[str, Any]]:
        """What a norm of the stream `x` adds, and its kernel's constants; where they do not fit, a launch adds it now."""
        left, constants, add = self._parts, {"LEFT": self._kind, "PARTS": self._count}, self._add
        self.clear()
        if left is not None and fits:
            return left, constants
        add()
        return nothing(x)


def _nothing() -> None:
    pass


def nothing(x: Any) -> tuple[Parts, dict[str, Any]]:
    """For a kernel that reads a stream which is there."""
    return Parts(x, x, x, 0, 1.0), {"LEFT": "", "PARTS": 0}


@triton.jit
def stream_at(x, left, row, column, ok, in_row, K, LEFT: tl.constexpr, PARTS: tl.constexpr):
    """The stream x in these rows, which there are, and columns, float32, zero where not `ok`; where something is LEFT made
    of that, and stored there."""
    at = row * K + column
    if LEFT == "":
        total = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    elif LEFT == "shares":
        place = row * PARTS
        total = at * 0.0
        for j in tl.static_range(PARTS):
            total += tl.load(left.more + place + j) * tl.load(left.sums + (place + j) * K + column, mask=ok, other=0.0)
    else:
        total = tl.load(left.sums + at, mask=ok, other=0.0)
        for part in tl.static_range(1, PARTS):
            total += tl.load(left.sums + part * left.stride + at, mask=ok, other=0.0)
        if LEFT == "biased":
            total += tl.load(left.more + column, mask=in_row, other=0.0)
    if LEFT != "":
        total = tl.load(left.residual + at, mask=ok, other=0.0) + left.alpha * total
        tl.store(x + at, total, mask=ok)
        total = tl.where(ok, total, 0.0)
    return total


def left_to_norms(nodes: Sequence[Node], kept: set[int]) -> list[tuple[int, int]]:
    """Nodes that add to the stream of a step's tokens, a map or experts, where a norm is the first to read that, and
    whoever else reads it does so behind the norm's results: places of both."""
    readers: dict[int, list[int]] = {}
    maker: dict[int, Node] = {}
    for i, node in enumerate(nodes):
        maker |= {v.id: node for v in node.outputs}
        for value in {v.id for v in node.inputs if isinstance(v, Value)}:
            readers.setdefault(value, []).append(i)
    found = []
    for i, node in enumerate(nodes):
        if node.op is not LINEAR_ADD and not (node.op is ADD and _of_experts(node, maker)):
            continue
        (out,) = node.outputs
        by = readers.get(out.id, [])
        if not by or out.id in kept or out.dims[0] != "T" or not _norms(nodes[by[0]], out):
            continue
        behind = {v.id for v in nodes[by[0]].outputs}
        for other in nodes[by[0] + 1 : by[-1]]:
            if any(isinstance(v, Value) and v.id in behind for v in other.inputs):
                behind |= {v.id for v in other.outputs}
        if all(any(isinstance(v, Value) and v.id in behind for v in nodes[r].inputs) for r in by[1:]):
            found.append((i, by[0]))
    return found


def _of_experts(add: Node, maker: Mapping[int, Node]) -> bool:
    """Whether an ADD's second term is made by experts, or by a shared one beside them."""
    value = add.inputs[1]
    return isinstance(value, Value) and value.id in maker and maker[value.id].op in (EXPERT_DOWN, LINEAR_ADD)


def _norms(node: Node, x: Value) -> bool:
    """Whether a node is, or begins with, an RMS norm of whole rows of x."""
    if node.op not in (NORM, NORM_LINEAR, NORM_GATE_UP) or node.inputs[0] is not x:
        return False
    spec = node.spec if node.op is NORM else node.spec.norm
    return bool(spec.kind == "rms" and spec.groups == 1 and all(v is not x for v in node.inputs[1:]))
