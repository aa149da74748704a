"""How often each expert of each layer is chosen, counted on the device: one scatter a step for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from quarrel.ops.contract import Array, Value
from quarrel.ops.moe import ROUTE
from quarrel.ops.program import Node


class ExpertCounts:
    """The counts of a program's layers lie one after the other in an int64 array, which a step takes and returns."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        routes = [n for n in nodes if n.op.name == ROUTE.name]
        self.ids: list[Value] = [n.outputs[0] for n in routes]
        self._paths = [n.path for n in routes]
        self._ends = np.cumsum([0, *(n.spec.n_experts for n in routes)]).tolist()

    def none(self) -> mx.array:
        """Nothing counted."""
        return mx.array(np.zeros(self._ends[-1], np.int64))

    def add(self, counts: mx.array, ids: Sequence[mx.array]) -> mx.array:
        """With what a step has chosen, `ids` int32 `[T, used]` a layer."""
        if not ids:
            return counts
        flat = mx.concatenate([i.reshape(-1) + start for i, start in zip(ids, self._ends)])
        return counts + mx.zeros(self._ends[-1], mx.int32).at[flat].add(1).astype(mx.int64)

    def read(self, counts: mx.array) -> dict[str, Array]:
        """By path; waits for the step that made them."""
        whole = np.array(counts)
        return {path: whole[a:z] for path, a, z in zip(self._paths, self._ends, self._ends[1:])}
