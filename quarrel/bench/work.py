"""What the phases of a step have to read and compute, from the program alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from quarrel.ops.attention import AttentionSpec
from quarrel.ops.contract import Compute, StateRef, WeightRef
from quarrel.ops.embedding import EmbeddingSpec
from quarrel.ops.encode import EncodeSpec
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec
from quarrel.ops.null import expand
from quarrel.ops.profile import Phase, phases
from quarrel.ops.program import Node, Program
from quarrel.ops.traffic import Traffic

PER_STATE = 6
"""Floating-point operations for each value of a recurrent state and token: decay, input, their sum, and the output's."""


@dataclass(frozen=True)
class Work:
    """Of one phase: its part of the traffic, and the nodes that compute."""

    traffic: Traffic
    nodes: tuple[Node, ...]
    states: int
    """Values of the recurrent states."""

    def nbytes(self, batch: int, context: float) -> float:
        """Bytes that a step reads which decodes a token of `batch` sequences with so many keys each."""
        return self.traffic.step(batch, context)

    def flops(self, context: float) -> float:
        """Floating-point operations a token with so many keys; a product and its sum are two."""
        return sum(_flops(node, context) for node in self.nodes) + PER_STATE * self.states


def work_of(program: Program, compute: Compute) -> dict[Phase, Work]:
    """The work of each phase; composites count as the ops that they expand into."""
    nodes = _expanded(program)
    marks = phases(nodes)
    found: dict[Phase, Work] = {}
    for phase in dict.fromkeys(marks):
        own = tuple(node for node, mark in zip(nodes, marks, strict=True) if mark == phase)
        states = [program.states[i.index] for node in own for i in node.inputs if isinstance(i, StateRef)]
        caches = program.caches if phase == "attention" else ()
        part = replace(program, nodes=own, caches=caches, states=tuple(states))
        size = sum(prod(s.shape) for s in states) if phase == "scan" else 0
        found[phase] = Work(Traffic.of(part, compute), own, size)
    return found


def _expanded(program: Program) -> list[Node]:
    """Primitives only."""
    ids = [v.id for n in program.nodes for v in n.outputs] + [v.id for v in program.inputs.values()]
    next_id, pending, nodes = 1 + max(ids), list(reversed(program.nodes)), list[Node]()
    while pending:
        node = pending.pop()
        if node.op.expand is None:
            nodes.append(node)
        else:
            body, next_id = expand(node, next_id)
            pending.extend(reversed(body))
    return nodes


def _flops(node: Node, context: float) -> float:
    spec = node.spec
    if isinstance(spec, EmbeddingSpec):
        return 0.0
    if isinstance(spec, AttentionSpec | EncodeSpec):
        window, latent = getattr(spec, "window", 0), getattr(spec, "latent", 0)
        scored, summed = spec.head_dim + latent, latent or spec.head_dim
        return 2 * spec.n_heads * (scored + summed) * (min(context, window) if window else context)
    share = spec.used / spec.n_experts if isinstance(spec, ExpertUpSpec | ExpertDownSpec) else 1.0
    return 2 * share * sum(r.rows * r.k for r in _matrices(node.inputs))


def _matrices(inputs: Sequence[object]) -> list[WeightRef]:
    return [i for i in inputs if isinstance(i, WeightRef) and i.rows > 1]
