"""Experts in host memory: which nodes of a program the host computes while the rest of it runs on a device.

A layer's experts are most of its weights, and a token reads few of them, so they are what is left behind where a device is
too small. The device hands over the rows, the chosen ids and their weights, and gets the sum over the chosen experts back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from quarrel.ops.contract import Array, Compute, Param, Value, WeightRef
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP
from quarrel.ops.program import Node, Program
from quarrel.ops.step import WeightSource

X, IDS, SHARES, OUT = "x", "ids", "weights", "out"


class Part(Protocol):
    """A few compiled nodes, for a bounded number of rows."""

    def run(self, arrays: Mapping[str, Array], wanted: tuple[str, ...]) -> dict[str, Array]:
        """The wanted results of these inputs, by their names in the program."""


@runtime_checkable
class ComputesParts(Protocol):
    """A backend whose memory is the host's."""

    def part(self, program: Program, weights: WeightSource, rows: int, compute: Compute) -> Part:
        """Compiles a program of any inputs, without cache or state; weights stay in place in the file's pages."""

    def device(self) -> str:
        """See `ops.step.Backend`."""

    def free_bytes(self) -> int:
        """See `ops.step.Backend`."""


@dataclass(frozen=True)
class ExpertPool:
    """Layers whose experts are alike, and how many experts of all of them are on the device too: those used most."""

    paths: tuple[str, ...]
    slots: int
    """Beside one of zeros, for the choices of experts that are not there."""


@dataclass(frozen=True)
class HostExperts:
    """Experts of the layers at `paths`, and the backend that computes them."""

    backend: ComputesParts
    paths: frozenset[str]
    streams: bool = False
    """The device has room for a layer's experts: steps of many rows take them there, a layer at a time."""
    stream_from: int | None = None
    """Rows from which they do; None is where that was measured to be faster."""
    pools: tuple[ExpertPool, ...] = ()
    """Of some of these layers, or all."""

    def takes(self, node: Node) -> bool:
        return node.path in self.paths and node.op in (EXPERT_UP, EXPERT_DOWN)

    def part(
        self, up: Node, down: Node, weights: WeightSource, rows: int, compute: Compute, by_pairs: bool = False
    ) -> Part:
        """Both products of a layer, from `X`, `IDS` and `SHARES` to `OUT`. by_pairs: of one expert for each row."""
        if by_pairs:
            up, down = _one_expert(up), _one_expert(down)
        x, ids, shares = up.inputs[0], up.inputs[1], down.inputs[2]
        assert isinstance(x, Value)
        assert isinstance(ids, Value)
        assert isinstance(shares, Value)
        program = Program((up, down), {X: x, IDS: ids, SHARES: shares}, {OUT: down.outputs[0]}, ())
        return self.backend.part(program, weights, rows, compute)


@runtime_checkable
class HostsExperts(Protocol):
    """A backend that can leave experts to the host."""

    def leave_to_host(self, experts: HostExperts | None) -> None:
        """From now on it compiles programs so."""

    def device_bytes(self, refs: Iterable[WeightRef], compute: Compute) -> int:
        """What these weights take in its memory."""


def computing_parts(backend: object) -> ComputesParts:
    """The backend as what it has to be here."""
    assert isinstance(backend, ComputesParts), backend
    return backend


def _one_expert(node: Node) -> Node:
    """EXPERT_UP or EXPERT_DOWN of one expert for each row."""
    spec = replace(node.spec, used=1)

    def narrow(params: Sequence[Param], values: Sequence[Any]) -> tuple[Any, ...]:
        shapes = [(param.dims(spec), value) for param, value in zip(params, values, strict=True)]
        return tuple(Value(v.id, v.kind, dims, v.name) if isinstance(v, Value) else v for dims, v in shapes)

    op = node.op
    return Node(op, spec, narrow(op.params(spec), node.inputs), narrow(op.results(spec), node.outputs), node.path)


def expert_refs(program: Program) -> dict[str, list[WeightRef]]:
    """The weights of each layer's experts, by the path of the layer, in the program's order."""
    found: dict[str, list[WeightRef]] = {}
    for node in program.nodes:
        if node.op in (EXPERT_UP, EXPERT_DOWN):
            found.setdefault(node.path, []).extend(ref for ref in node.inputs if isinstance(ref, WeightRef))
    return found
