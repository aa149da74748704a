"""Which experts a model chooses for a prompt: its program run op by op on the backend, as QUARREL_CHECK runs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quarrel.gguf import GGUFFile
from quarrel.models import EncoderSpec, Tensors, assemble, read_spec
from quarrel.ops.check import CheckedStep
from quarrel.ops.contract import Concrete
from quarrel.ops.program import Node
from quarrel.ops.step import Backend, ComputeChoice, Limits, StepInputs

BLOCK = 32


class _Listener(CheckedStep):
    """Compares nothing; keeps what the routers chose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.chosen: list[list[list[int]]] = []

    def verify(self, node: Node, inputs: Sequence[Concrete], got: Sequence[Concrete]) -> None:
        if node.op.name == "route":
            assert isinstance(got[0], np.ndarray)
            self.chosen.append(np.sort(got[0], -1).tolist())


def selections(path: Path, backend: Backend, compute: ComputeChoice, ids: Sequence[int]) -> list[list[list[int]]]:
    """Expert ids `[layer][token]`, ascending; empty for a model without experts."""
    with GGUFFile.open(path) as file:
        spec, tensors = read_spec(file), Tensors(file)
        program = assemble(spec, tensors)
        if isinstance(spec, EncoderSpec) or not any(node.op.name == "route" for node in program.nodes):
            return []
        count, blocks = len(ids), -(-len(ids) // BLOCK)
        step = _Listener(backend, program, tensors, Limits(count, 1, blocks, blocks, BLOCK), compute)
        at = np.arange(count, dtype=np.int32)
        one = np.zeros(1, np.int32)
        ends = np.array([0, count], np.int32)
        table = np.arange(blocks, dtype=np.int32)[None]
        last = np.array([count - 1], np.int32)
        step(StepInputs(np.array(ids, np.int32), at, at, ends, ends[1:], table, last, None, one), "logits")
        return step.chosen


def agreement(now: Sequence[Sequence[Sequence[int]]], then: Sequence[Sequence[Sequence[int]]]) -> float:
    """Share of the choices of `then` that `now` makes too."""
    same = total = 0
    for layer, other in zip(now, then, strict=True):
        for mine, theirs in zip(layer, other, strict=True):
            same += len(set(mine) & set(theirs))
            total += len(theirs)
    return same / total if total else 1.0
