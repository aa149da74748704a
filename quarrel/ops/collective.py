"""What the members of a group do together: each holds a share of the weights and computes a part of every result.

    all_reduce:      y = sum over the members of x                        the same bits for all of them
    all_reduce_add:  y = residual + scale * all_reduce(x)
    place:           y[t, start:start + n] = x[t], zero elsewhere         one member's columns of a wider row
    all_gather:      all_reduce(place(x))                                 the columns of all members, side by side
    broadcast:       y = x of the member `source`

Sums are float32. A group of one adds nothing, and that is what the references compute: the exact result of a larger group
is the sum of theirs. Every member runs the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from quarrel.ops import draw
from quarrel.ops.contract import Array, Case, Op, Operand, Param, Value
from quarrel.ops.linear import ADD, AddSpec
from quarrel.ops.null import Builder


class Group(Protocol):
    """The other members, as a backend needs them; a buffer is the backend's own kind of flat float32 array."""

    rank: int
    size: int

    def all_reduce(self, buffer: Any) -> None:
        """Replaces the buffer by the sum of everyone's, in the order of the device's other work."""

    def all_reduce_add(self, target: Any, residual: Any, part: Any, scale: float) -> bool:
        """`target = residual + scale * sum(part)` in one go if the group can; False if nothing was done."""

    def broadcast(self, buffer: Any, source: int) -> None:
        """Replaces the buffer by that of `source`."""


class PeerSums(Protocol):
    """Small sums over devices that reach each other's memory, in one launch. Buffers are the backend's own."""

    most: int
    """Values of the largest sum."""

    def __init__(self, rank: int, memory: list[Any]) -> None:
        """memory: of each member, by rank, as this process sees it."""

    @staticmethod
    def words(members: int) -> int:
        """int32s of a member's memory."""

    def sum(self, out: Any, x: Any, residual: Any = None, scale: float = 1.0) -> None:
        """`out = residual + scale * sum(x)`; `out` may be `x`."""

    def release(self) -> None:
        """Gives, once, the signals that a lost member cannot give."""


@runtime_checkable
class Joins(Protocol):
    """A backend that can be a member of a group."""

    peer_sums: type[PeerSums] | None
    """Its own small sums; None leaves all of them to the group."""

    def join(self, group: Group) -> None:
        """From now on it compiles for this group."""


@dataclass(frozen=True)
class AllReduceSpec:
    """Rows of `n`."""

    n: int


ALL_REDUCE = Op(
    "all_reduce",
    AllReduceSpec,
    lambda s: (Param("x", "f32", "T n"),),
    lambda s: (Param("y", "f32", "T n"),),
    reference=lambda s, x: (x.copy(),),
    make=lambda c, rng: (draw.activations(rng, c.dims["T"], c.spec.n),),
    cases=lambda: [Case(AllReduceSpec(n), {"T": t}) for n, t in ((1, 1), (77, 3), (512, 17))],
)


@dataclass(frozen=True)
class AllReduceAddSpec:
    """Rows of `n`; the sum is scaled."""

    n: int
    scale: float = 1.0


def _all_reduce_add_expand(b: Builder, s: AllReduceAddSpec, inputs: Sequence[Operand]) -> Sequence[Value]:
    residual, x = inputs
    (y,) = b.emit(ALL_REDUCE, AllReduceSpec(s.n), x)
    return b.emit(ADD, AddSpec(s.n, s.scale), residual, y)


ALL_REDUCE_ADD = Op(
    "all_reduce_add",
    AllReduceAddSpec,
    lambda s: (Param("residual", "f32", "T n"), Param("x", "f32", "T n")),
    lambda s: (Param("y", "f32", "T n"),),
    expand=_all_reduce_add_expand,
    make=lambda c, rng: (
        draw.activations(rng, c.dims["T"], c.spec.n),
        draw.activations(rng, c.dims["T"], c.spec.n),
    ),
    cases=lambda: [Case(AllReduceAddSpec(n, scale), {"T": t}) for n, t, scale in ((64, 1, 1.0), (77, 5, 0.22))],
)


@dataclass(frozen=True)
class PlaceSpec:
    """`n` columns at `start` of rows of `total`."""

    n: int
    start: int
    total: int


def _place_reference(s: PlaceSpec, x: Array) -> tuple[Array]:
    y = np.zeros((len(x), s.total), np.float32)
    y[:, s.start : s.start + s.n] = x
    return (y,)


PLACE = Op(
    "place",
    PlaceSpec,
    lambda s: (Param("x", "act", "T n"),),
    lambda s: (Param("y", "f32", "T total"),),
    reference=_place_reference,
    make=lambda c, rng: (draw.activations(rng, c.dims["T"], c.spec.n),),
    cases=lambda: [
        Case(PlaceSpec(5, 0, 9), {"T": 1}, "first"),
        Case(PlaceSpec(77, 23, 100), {"T": 3}, "last, odd"),
        Case(PlaceSpec(64, 64, 1500), {"T": 9}, "in between"),
    ],
)


def _all_gather_expand(b: Builder, s: PlaceSpec, inputs: Sequence[Operand]) -> Sequence[Value]:
    (y,) = b.emit(PLACE, s, *inputs)
    return b.emit(ALL_REDUCE, AllReduceSpec(s.total), y)


ALL_GATHER = Op(
    "all_gather",
    PlaceSpec,
    PLACE.params,
    PLACE.results,
    expand=_all_gather_expand,
    make=PLACE.make,
    cases=lambda: [Case(replace(PLACE.cases()[1].spec), {"T": 3})],
)


@dataclass(frozen=True)
class BroadcastSpec:
    """Rows of `n`; `mine` at the member that they come from. The others only know how many rows will come."""

    n: int
    source: int
    mine: bool


BROADCAST = Op(
    "broadcast",
    BroadcastSpec,
    lambda s: (Param("x", "f32", "T n"),) if s.mine else (Param("ids", "i32", "T"),),
    lambda s: (Param("y", "f32", "T n"),),
    reference=lambda s, x: (x.copy() if s.mine else np.zeros((len(x), s.n), np.float32),),
    make=lambda c, rng: (draw.activations(rng, c.dims["T"], c.spec.n),),
    cases=lambda: [Case(BroadcastSpec(77, 0, True), {"T": 3})],
    joint=True,
)

GROUP_OPS = {op.name: op for op in (ALL_REDUCE, ALL_REDUCE_ADD, PLACE, ALL_GATHER, BROADCAST)}
"""Contracts of a group; a backend without them runs models on one device only."""


def all_reduce(b: Builder, x: Value) -> Value:
    """The sum over the group, `[T, n]` float32."""
    return b.emit(ALL_REDUCE, AllReduceSpec(int(x.dims[1])), x)[0]


def all_reduce_add(b: Builder, residual: Value, x: Value, scale: float = 1.0) -> Value:
    """`residual + scale * (the sum over the group)`, `[T, n]` float32."""
    return b.emit(ALL_REDUCE_ADD, AllReduceAddSpec(int(x.dims[1]), scale), residual, x)[0]


def place(b: Builder, x: Value, start: int, total: int) -> Value:
    """`x` as columns `start` to `start + n` of rows that are zero elsewhere, `[T, total]` float32."""
    return b.emit(PLACE, PlaceSpec(int(x.dims[1]), start, total), x)[0]


def all_gather(b: Builder, x: Value, start: int, total: int) -> Value:
    """The columns of all members side by side, `[T, total]` float32; `x` begins at `start`."""
    return b.emit(ALL_GATHER, PlaceSpec(int(x.dims[1]), start, total), x)[0]


def broadcast(b: Builder, x: Value | None, n: int, source: int) -> Value:
    """The rows of member `source`, `[T, n]` float32; `x` is None at the others."""
    return b.emit(BROADCAST, BroadcastSpec(n, source, x is not None), b.input("ids") if x is None else x)[0]
