"""A composite op by its parts, for steps of several rows: a norm into scratch, then its maps together (`linear.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quarrel.ops.activation import GATED
from quarrel.ops.collective import Group
from quarrel.ops.contract import CacheRef, Compute, ConstRef, StateRef, Value, WeightRef
from quarrel.ops.linear import LINEAR
from quarrel.ops.null import expand
from quarrel.ops.program import Node
from quarrel.triton_backend import linear, norm
from quarrel.triton_backend.float8 import Codes
from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.runtime import DTYPES, Alone, Cache, Launch, Launcher, Site, Slot, Work, dims


@dataclass(frozen=True)
class Inner(Alone):
    """A site for the parts of a composite: values between them lie in its scratch."""

    outer: Site
    between: dict[int, Slot]

    @property
    def launch(self) -> Launcher:
        return self.outer.launch

    @property
    def compute(self) -> Compute:
        return self.outer.compute

    @property
    def work(self) -> Work:
        return self.outer.work

    @property
    def generation(self) -> int:
        return self.outer.generation

    @property
    def deterministic(self) -> bool:
        return self.outer.deterministic

    @property
    def float8(self) -> bool:
        return self.outer.float8

    @property
    def whole(self) -> int:
        return self.outer.whole

    @property
    def group(self) -> Group | None:
        return self.outer.group

    def slot(self, value: Value) -> Slot:
        return self.between.get(value.id) or self.outer.slot(value)

    def weight(self, ref: WeightRef) -> Packed:
        return self.outer.weight(ref)

    def codes(self, weight: Packed) -> Codes:
        return self.outer.codes(weight)

    def vector(self, ref: WeightRef) -> torch.Tensor:
        return self.outer.vector(ref)

    def const(self, ref: ConstRef) -> torch.Tensor:
        return self.outer.const(ref)

    def cache(self, ref: CacheRef) -> Cache:
        return self.outer.cache(ref)

    def state(self, ref: StateRef) -> torch.Tensor:
        return self.outer.state(ref)

    def scratch(self, dim: str, width: int, dtype: torch.dtype = torch.float32) -> Slot:
        return self.outer.scratch(dim, width, dtype)

    def counter(self, path: str, width: int) -> torch.Tensor:
        return self.outer.counter(path, width)

    def zeros(self, dim: str, width: int) -> Slot:
        return self.outer.zeros(dim, width)


def expanded(site: Site, node: Node) -> Launch:
    """A composite for several rows: the norm, then its maps together, on the kernels of `linear.py`."""
    (normed, *maps), _ = expand(node, 1 << 30)
    (middle,) = normed.outputs
    axis, width = dims(middle)
    x = site.scratch(axis, width, DTYPES[site.compute])
    inner = Inner(site, {middle.id: x})
    made = linear.Made(norm.build_norm(inner, normed), norm.arranger(inner, normed))
    linears = [part for part in maps if part.op.name == LINEAR.name]
    weights = [site.weight(part.inputs[1]) for part in linears]  # type: ignore[arg-type]
    biases = [site.vector(part.inputs[2]) if part.spec.bias else None for part in linears]  # type: ignore[arg-type]
    if maps[-1].op.name == GATED.name:
        y = site.slot(node.outputs[0])
        return linear.gate_up(site, x, y, weights[0], weights[1], biases, maps[-1].spec.activation, axis, made)
    return linear.several(site, x, [site.slot(v) for v in node.outputs], weights, biases, axis, made)
