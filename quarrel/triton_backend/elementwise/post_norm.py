"""Layers that are normalised after each half, as an encoder's: the sum, its norm and its rounding in one launch.

    h = norm(residual + y),  x = h rounded

y is the linear map of the half, rounded to the compute type; h is the next residual, float32, and x what the next linear
maps read, which would round h each for itself. For wide rows this is all that a step does between its products: 9 bytes a
value for 34. A program takes a row, whose sums never depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import triton
import triton.language as tl

from quarrel.ops.contract import Array, Compute, Op, Param, RawWeight, Value
from quarrel.ops.linear import LINEAR, LINEAR_ADD
from quarrel.ops.norm import NORM, NormSpec, norm_reference
from quarrel.ops.program import Node
from quarrel.ops.registry import Choice, Implementation
from quarrel.triton_backend.linear.matvec import WITHOUT_MATVEC
from quarrel.triton_backend.runtime.launch import power_of_two
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, starts_early

_WIDEST = 4096


@dataclass(frozen=True)
class PostNormSpec:
    """`adds`: whether there is a y to add."""

    norm: NormSpec
    adds: bool

    @property
    def k(self) -> int:
        return self.norm.k


def _params(s: PostNormSpec) -> tuple[Param, ...]:
    added = (Param("y", "act", "T k"),) if s.adds else ()
    bias = (Param("bias", "weight", "k"),) if s.norm.kind == "layer" else ()
    return (Param("residual", "f32", "T k"), *added, Param("gain", "weight", "k"), *bias)


def _reference(s: PostNormSpec, residual: Array, *rest: Array | RawWeight) -> tuple[Array, Array]:
    """NumPy body."""
    total = residual + rest[0] if s.adds else residual
    (h,) = norm_reference(s.norm, np.asarray(total), *rest[s.adds :])  # type: ignore[arg-type]
    return h, h


POST_NORM = Op(
    "post_norm",
    PostNormSpec,
    _params,
    lambda s: (Param("h", "f32", "T k"), Param("x", "act", "T k")),
    reference=_reference,
)


@triton.jit
def post_norm_rows(
    h, x, residual, y, gain, bias, K, eps, ADDS: tl.constexpr, LAYER: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.arange(0, C)
    ok = column < K
    at = tl.program_id(0).to(tl.int64) * K + column
    value = tl.load(residual + at, mask=ok, other=0.0)
    if ADDS:
        value += tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
    if LAYER:
        value = tl.where(ok, value - tl.sum(value, 0) / K, 0.0)
    value = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / K + eps)) * tl.load(gain + column, mask=ok, other=0.0)
    if LAYER:
        value += tl.load(bias + column, mask=ok, other=0.0)
    tl.store(h + at, value, mask=ok)
    tl.store(x + at, value.to(x.dtype.element_ty), mask=ok)


def build_post_norm(site: Site, node: Node) -> Launch:
    """POST_NORM: residual `[T, k]` float32, y `[T, k]`, gain and bias `[k]`."""
    spec: PostNormSpec = node.spec
    residual, *rest = node.inputs
    source, h, x = site.slot(residual), site.slot(node.outputs[0]), site.slot(node.outputs[1])  # type: ignore[arg-type]
    y = site.slot(rest[0]) if spec.adds else source  # type: ignore[arg-type]
    vectors = [site.vector(g) for g in rest[spec.adds :]]  # type: ignore[arg-type]
    axis, _ = dims(node.outputs[0])

    def run(batch: Batch) -> None:
        site.launch(
            post_norm_rows, (batch.count(axis),), h.tensor, x.tensor, source.tensor, y.tensor, vectors[0], vectors[-1],
            spec.k, spec.norm.eps, ADDS=spec.adds, LAYER=spec.norm.kind == "layer", C=power_of_two(spec.k),
            warps=8 if spec.k > 2048 else 4, early=starts_early(site),
        )  # fmt: skip

    return run


_POST_NORM = Implementation(POST_NORM, "sum, norm and rounding", build_post_norm)


def fused(choices: Sequence[Choice], kept: set[int], compute: Compute) -> list[Choice]:
    """The choices with each norm of the residual stream that linear maps read as a POST_NORM; `kept` are results."""
    nodes = [c.node for c in choices]
    if compute == "float32":
        return list(choices)
    readers: dict[int, list[int]] = {}
    makers = {v.id: i for i, node in enumerate(nodes) for v in node.outputs}
    for i, node in enumerate(nodes):
        for value in {v.id for v in node.inputs if isinstance(v, Value)}:
            readers.setdefault(value, []).append(i)
    next_id = 1 + max((v.id for n in nodes for v in (*n.inputs, *n.outputs) if isinstance(v, Value)), default=0)
    made = list(choices)
    rounded: dict[int, Value] = {}
    for i, node in enumerate(nodes):
        if node.op is not NORM:  # some have no outputs
            continue
        h = node.outputs[0]
        if not _takes(node, [nodes[r] for r in readers.get(h.id, [])]):
            continue
        total, *gains = node.inputs
        assert isinstance(total, Value)
        before = makers.get(total.id)
        x = rounded[h.id] = Value(next_id, "act", h.dims, "x")
        next_id += 2
        spec, inputs = PostNormSpec(node.spec, adds=False), (total, *gains)
        if before is not None and readers[total.id] == [i] and total.id not in kept and _adds(nodes[before]):
            y = Value(x.id + 1, "act", h.dims, "y")
            residual, *rest = nodes[before].inputs
            part = replace(nodes[before], op=LINEAR, spec=nodes[before].spec.linear, inputs=tuple(rest), outputs=(y,))
            made[before] = Choice(part, WITHOUT_MATVEC, ())
            spec, inputs = PostNormSpec(node.spec, adds=True), (residual, y, *gains)  # type: ignore[assignment]
        made[i] = Choice(replace(node, op=POST_NORM, spec=spec, inputs=inputs, outputs=(h, x)), _POST_NORM, ())
    return [_reading(choice, rounded) for choice in made]


def _takes(node: Node, readers: Sequence[Node]) -> bool:
    s: NormSpec = node.spec
    fits = s.out == "f32" and s.groups == 1 and s.k <= _WIDEST and node.inputs[0].kind == "f32"  # type: ignore[union-attr]
    return fits and any(_reads(r, node.outputs[0]) for r in readers)


def _reads(node: Node, value: Value) -> bool:
    return node.op is LINEAR and node.inputs[0] is value and node.spec.out == "act"


def _adds(node: Node) -> bool:
    return node.op is LINEAR_ADD and node.spec.scale == 1.0 and node.spec.linear.out == "act"


def _reading(choice: Choice, rounded: dict[int, Value]) -> Choice:
    """A linear map of what is there rounded reads that."""
    x, *rest = choice.node.inputs
    if choice.node.op is not LINEAR or not isinstance(x, Value) or x.id not in rounded:
        return choice
    return replace(choice, node=replace(choice.node, inputs=(rounded[x.id], *rest)))
