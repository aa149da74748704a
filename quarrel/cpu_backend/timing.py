"""The seconds of each stage of a step, from the times at which the pool's threads opened them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quarrel.cpu_backend.plan import Tables
from quarrel.cpu_backend.runtime.pool import Pool, StageTable
from quarrel.ops.profile import Part, Phase, phases
from quarrel.ops.program import Node

_KERNELS: Mapping[str, Phase] = {"norm": "norm", "gated_norm": "norm", "attention": "attention"}
"""Phases of kernels, by the first part of their name, where they differ from their node's, or serve every layer."""


def parts_of(tables: Tables, nodes: Sequence[Node]) -> tuple[Part, ...]:
    """A part for each stage; one that serves several layers has no path."""
    named = phases(nodes)

    def part(node: int, kernel: str) -> Part:
        phase = _KERNELS.get(kernel.partition("/")[0])
        if node < 0:
            return Part("", "", kernel, phase or "head")
        return Part(nodes[node].path, nodes[node].op.name, kernel, phase or named[node])

    return tuple(part(node, kernel) for (node, *_), kernel in zip(tables.stages, tables.kernels, strict=True))


class StageTimes:
    """Runs the pieces of a step and keeps when its stages began."""

    def __init__(self) -> None:
        self._stages: list[Sequence[int]] = []
        self._seconds: list[Any] = []

    def run(self, pool: Pool, stages: Sequence[int], piece: StageTable | Callable[[], None]) -> None:
        """Runs `piece`, which is these stages of the plan."""
        self._stages.append(stages)
        if isinstance(piece, StageTable):
            times = np.zeros((len(stages) + 1, 2), np.int64)
            pool.run(piece, times)
            self._seconds.append(np.diff(times @ (10**9, 1)) * 1e-9)
        else:
            began = time.perf_counter()
            piece()
            self._seconds.append([time.perf_counter() - began])

    def of(self, parts: Sequence[Part]) -> tuple[tuple[Part, ...], tuple[float, ...]]:
        """The parts that ran, and their seconds."""
        ran = tuple(parts[i] for stages in self._stages for i in stages)
        return ran, tuple(np.concatenate(self._seconds).tolist()) if ran else ()
