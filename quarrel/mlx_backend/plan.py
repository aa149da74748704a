"""A lowered program bound to its weights: one function from arrays to arrays for each result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from quarrel.mlx_backend.formats.layout import Packed
from quarrel.mlx_backend.runtime.launch import DTYPES, Batch, Launch, Operand
from quarrel.mlx_backend.weights import Weights
from quarrel.ops.contract import CacheRef, Compute, ConstRef, StateRef, Value, WeightRef
from quarrel.ops.program import Node, needed
from quarrel.ops.registry import Choice

Resident = dict[CacheRef | StateRef, Operand]
"""Caches and states by who refers to them."""


class Plan:
    """Built once. States that `run` consumes it hands back anew, caches are written where they are."""

    def __init__(self, choices: Sequence[Choice], weights: Weights, compute: Compute) -> None:
        self.choices, self.weights, self.compute = tuple(choices), weights, compute
        self.act = DTYPES[compute]
        self._launches: list[Launch] = [c.implementation.build(self, c.node) for c in self.choices]

    def drop(self) -> None:
        """Lets go of what was built: launches refer to their plan, and would wait for a garbage collection."""
        self._launches.clear()

    def run(
        self, batch: Batch, inputs: Mapping[int, mx.array], resident: Resident, wanted: Sequence[Value]
    ) -> tuple[list[mx.array], Resident]:
        """The wanted values, and the caches and states as they are afterwards. `resident` is left as it is."""
        values: dict[int, mx.array] = dict(inputs)
        resident = dict(resident)
        nodes = [c.node for c in self.choices]
        marks = needed(nodes, wanted)
        uses = _last_uses(nodes, marks)
        keep = {v.id for v in wanted}
        for i, (node, launch) in enumerate(zip(nodes, self._launches)):
            if not marks[i]:
                continue
            operands: list[Operand] = []
            for operand in node.inputs:
                if isinstance(operand, Value):
                    operands.append(values[operand.id])
                elif isinstance(operand, CacheRef | StateRef):
                    operands.append(resident[operand])
            results = list(launch(batch, *operands))
            if node.op.consumes:
                refs = [r for r in node.inputs if isinstance(r, CacheRef | StateRef)]
                resident.update(zip(refs, results[-len(refs) :], strict=True))
                del results[-len(refs) :]
            values.update(zip((v.id for v in node.outputs), results, strict=True))  # type: ignore[arg-type]
            # An array that nothing refers to any more is one that MLX may write over.
            for id in uses.get(i, ()):
                if id not in keep:
                    values.pop(id, None)
        return [values[v.id] for v in wanted], resident

    # What a family asks while it builds (`Site`).

    def weight(self, ref: WeightRef) -> Packed:
        return self.weights.matrix(ref)

    def vector(self, ref: WeightRef) -> mx.array:
        return self.weights.vector(ref)

    def const(self, ref: ConstRef) -> mx.array:
        return self.weights.const(ref)

    def dtype(self, kind: str) -> mx.Dtype:
        return {"act": self.act, "f32": mx.float32, "i32": mx.int32}[kind]


def _last_uses(nodes: Sequence[Node], marks: Sequence[bool]) -> dict[int, list[int]]:
    """Node number -> the values that nothing after it reads."""
    last: dict[int, int] = {}
    for i, (node, mark) in enumerate(zip(nodes, marks)):
        if mark:
            last |= {v.id: i for v in (*node.outputs, *(o for o in node.inputs if isinstance(o, Value)))}
    uses: dict[int, list[int]] = {}
    for id, i in last.items():
        uses.setdefault(i, []).append(id)
    return uses
