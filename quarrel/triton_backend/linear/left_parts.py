"""Parts of K that a map onto the residual stream leaves to the norm behind it.

The ring (`ring.py`) cuts K, so that a few rows keep the device busy, and leaves float32 sums of each part. Where a norm is
the first to read the stream that they belong to, its launch adds them, in order, and writes the stream: a launch less, and
the stream is read once less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from quarrel.ops.contract import Value
from quarrel.ops.linear import LINEAR_ADD, NORM_GATE_UP, NORM_LINEAR
from quarrel.ops.norm import NORM
from quarrel.ops.program import Node

MOST_ROWS = 128
"""Rows up to which parts are left: a norm has a program to a row."""


class Parts(NamedTuple):
    """Sums of parts of K, and what makes the stream of them: residual + alpha * (their sum + bias)."""

    sums: Any  # float32 [parts, rows, K], `stride` values apart
    bias: Any  # float32 [K], read if BIAS
    residual: Any  # float32 [rows, K]
    stride: int
    alpha: float


class LeftParts:
    """Between one map and the norm behind it: what the map left in this step, if anything."""

    def __init__(self) -> None:
        self._parts: Parts | None = None
        self._count, self._bias, self._add = 0, False, _nothing

    def clear(self) -> None:
        """Nothing is left, as the map may write the stream itself."""
        self._parts = None

    def leave(self, parts: Parts, count: int, bias: bool, add: Callable[[], None]) -> None:
        """So many parts, with a bias or without; `add` launches what writes the stream by itself."""
        self._parts, self._count, self._bias, self._add = parts, count, bias, add

    def take(self, x: Any, fits: bool = True) -> tuple[Parts, dict[str, Any]]:
        """What a norm of the stream `x` adds, and its kernel's constants; where they do not fit, a launch adds it now."""
        left, self._parts = self._parts, None
        if left is not None and not fits:
            self._add()
            left = None
        if left is None:
            return nothing(x)
        return left, {"PARTS": self._count, "BIASED": self._bias}


def _nothing() -> None:
    pass


def nothing(x: Any) -> tuple[Parts, dict[str, Any]]:
    """For a kernel that reads a stream which is there."""
    return Parts(x, x, x, 0, 1.0), {"PARTS": 0, "BIASED": False}


@triton.jit
def stream_at(x, left, at, column, ok, in_row, PARTS: tl.constexpr, BIASED: tl.constexpr):
    """The stream x at these places, which are of these columns; with PARTS made of them, and stored there. float32."""
    if PARTS == 0:
        return tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    else:
        total = tl.load(left.sums + at, mask=ok, other=0.0)
        for part in tl.static_range(1, PARTS):
            total += tl.load(left.sums + part * left.stride + at, mask=ok, other=0.0)
        if BIASED:
            total += tl.load(left.bias + column, mask=in_row, other=0.0)
        total = tl.load(left.residual + at, mask=ok, other=0.0) + left.alpha * total
        tl.store(x + at, total, mask=ok)
        return tl.where(ok, total, 0.0)


def left_to_norms(nodes: Sequence[Node], kept: set[int]) -> list[tuple[int, int]]:
    """LINEAR_ADDs of a step's tokens whose stream a norm is the first to read, where whoever else reads it does so behind
    that norm's results: places of both among the nodes."""
    readers: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for value in {v.id for v in node.inputs if isinstance(v, Value)}:
            readers.setdefault(value, []).append(i)
    found = []
    for i, node in enumerate(nodes):
        if node.op is not LINEAR_ADD:
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


def _norms(node: Node, x: Value) -> bool:
    """Whether a node is, or begins with, an RMS norm of whole rows of x."""
    if node.op not in (NORM, NORM_LINEAR, NORM_GATE_UP) or node.inputs[0] is not x:
        return False
    spec = node.spec if node.op is NORM else node.spec.norm
    return bool(spec.kind == "rms" and spec.groups == 1 and all(v is not x for v in node.inputs[1:]))
