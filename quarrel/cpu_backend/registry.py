"""Which implementation takes which op on the CPU, family by family, and in which form it reads activations."""

from __future__ import annotations

from quarrel.cpu_backend import collective, elementwise, norm, recurrent, streams
from quarrel.cpu_backend.attention import attention, rope
from quarrel.cpu_backend.experts import experts
from quarrel.cpu_backend.linear import heads, kernels, linear
from quarrel.cpu_backend.lowering import Lowering
from quarrel.cpu_backend.sampling import adjust, logprobs, sample
from quarrel.ops import EXPERT_DOWN, EXPERT_UP, LINEAR, LINEAR_ADD
from quarrel.ops.program import Node
from quarrel.ops.registry import Registry

FAMILIES = (
    elementwise, norm, streams, linear, heads, rope, attention, adjust, sample, logprobs, experts, recurrent, collective,
)  # fmt: skip

REGISTRY = Registry("cpu", [i for family in FAMILIES for i in family.IMPLEMENTATIONS])


def forms_read(e: Lowering, node: Node, position: int) -> set[str]:
    """In which forms a node reads the operand at `position`: "f32", or "q" where it is rounded to 8 bits."""
    if node.op is LINEAR and position == 0:
        return kernels.choose(e, kernels.KERNELS, node.spec).forms
    if node.op is LINEAR_ADD and position == 1:
        return kernels.choose(e, kernels.KERNELS, node.spec.linear).forms
    if node.op in (EXPERT_UP, EXPERT_DOWN) and position == 0:
        return kernels.choose(e, experts.KERNELS, node.spec).forms
    return {"f32"}
