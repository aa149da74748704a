"""Linear maps, and what is fused with them; `kernels.py` says which kernel takes what."""

from __future__ import annotations

from collections.abc import Sequence

from quarrel.cpu_backend.elementwise import gated_stage
from quarrel.cpu_backend.linear.kernels import KERNELS, choose, linear_jobs
from quarrel.cpu_backend.lowering import Field, Lowering
from quarrel.cpu_backend.norm import norm_stage
from quarrel.ops.activation import GatedSpec
from quarrel.ops.contract import Operand, Value
from quarrel.ops.linear import LINEAR, LINEAR_ADD, NORM_GATE_UP, NORM_LINEAR, LinearSpec
from quarrel.ops.norm import NormSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation


def build_linear(e: Lowering, node: Node) -> None:
    x, weight, *bias = node.inputs
    e.plan.stage(*linear_jobs(e, x, node.spec, weight, bias[0] if bias else None, node.outputs[0]))


def build_linear_add(e: Lowering, node: Node) -> None:
    s, (residual, x, weight, *bias) = node.spec, node.inputs
    y = e.plan.place(node.outputs[0])
    e.plan.stage(*linear_jobs(e, x, s.linear, weight, bias[0] if bias else None, y, residual, s.scale))


def _normed(
    e: Lowering, s: NormSpec, linears: Sequence[LinearSpec], inputs: Sequence[Operand]
) -> tuple[Value, list[Operand]]:
    """The norm of a node's first input, a value that only this node reads; and the weights and biases of its maps."""
    p = e.plan
    x, *rest = inputs
    assert isinstance(x, Value)
    count = 2 if s.kind == "layer" else 1
    value = Value(-1 - p.node, "act", (p.rows(x), s.width), "normed")
    forms = set[str]().union(*(choose(e, KERNELS, linear).forms for linear in linears))
    norm_stage(e, x, s, rest[:count], p.place(value), p.place(value, "q") if "q" in forms else None)
    return value, rest[count:]


def _maps(e: Lowering, x: Value, linears: Sequence[LinearSpec], rest: list[Operand], ys: Sequence[Field]) -> None:
    """One stage for several maps of the same rows."""
    jobs = []
    for linear, y in zip(linears, ys, strict=True):
        weight, bias = rest.pop(0), rest.pop(0) if linear.bias else None
        jobs += linear_jobs(e, x, linear, weight, bias, y)  # type: ignore[arg-type]
    e.plan.stage(*jobs)
    e.plan.end_value(x)


def build_norm_linear(e: Lowering, node: Node) -> None:
    s = node.spec
    x, rest = _normed(e, s.norm, s.linears, node.inputs)
    _maps(e, x, s.linears, rest, node.outputs)


def build_norm_gate_up(e: Lowering, node: Node) -> None:
    s, p = node.spec, e.plan
    x, rest = _normed(e, s.norm, (s.gate, s.up), node.inputs)
    size = 4 * s.gate.n * p.sizes[p.rows(x)]
    gate, up = p.temporary(size), p.temporary(size)
    _maps(e, x, (s.gate, s.up), rest, (gate, up))
    gated_stage(e, GatedSpec(s.activation, s.gate.n), gate, up, node.outputs[0])


IMPLEMENTATIONS = (
    Implementation(LINEAR, "linear", build_linear),
    Implementation(LINEAR_ADD, "linear + residual", build_linear_add),
    Implementation(NORM_LINEAR, "norm + linear", build_norm_linear),
    Implementation(NORM_GATE_UP, "norm + gate/up", build_norm_gate_up),
)
