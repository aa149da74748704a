"""One op of the contract on tensors that are there: no plan, no buffers of its own, nothing kept from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from quarrel.gguf import GGMLType
from quarrel.ops.contract import CacheRef, Compute, ConstRef, Op, Operand, StateRef, Value, WeightRef
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import lower
from quarrel.triton_backend.backend import REGISTRY
from quarrel.triton_backend.buffers import dtype_of
from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.runtime import DTYPES, INTERPRETED, Alone, Cache, Launcher, Live, Slot, Work, launch

Given = torch.Tensor | Packed | Cache
COMPUTE: dict[torch.dtype, Compute] = {dtype: compute for compute, dtype in DTYPES.items()}


class _Later(Slot):
    """Memory that is only taken when a launch asks for it."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, zero: bool) -> None:
        self._how = (size, dtype, device, zero)
        self._made: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        if self._made is None:
            size, dtype, device, zero = self._how
            self._made = (torch.zeros if zero else torch.empty)(size, dtype=dtype, device=device)
        return self._made


@dataclass
class Call(Alone):
    """What a launcher asks while it is built (`triton_backend.runtime.Site`)."""

    live: Live
    compute: Compute
    device: torch.device
    work: Work
    deterministic: bool = False
    launch: Launcher = launch
    float8: bool = False
    group: None = None
    slots: dict[int, Slot] = field(default_factory=dict)
    weights: dict[WeightRef, Packed] = field(default_factory=dict)
    vectors: dict[WeightRef, torch.Tensor] = field(default_factory=dict)
    caches: list[Cache] = field(default_factory=list)

    @property
    def generation(self) -> int:
        return 0 if INTERPRETED else torch.cuda.get_device_capability(self.device)[0]

    def slot(self, value: Value) -> Slot:
        return self.slots[value.id]

    def weight(self, ref: WeightRef) -> Packed:
        return self.weights[ref]

    def vector(self, ref: WeightRef) -> torch.Tensor:
        return self.vectors[ref]

    def cache(self, ref: CacheRef) -> Cache:
        return self.caches[ref.layer]

    def const(self, ref: ConstRef) -> torch.Tensor:
        return torch.tensor(ref.data, dtype=torch.float32, device=self.device)

    def state(self, ref: StateRef) -> torch.Tensor:
        raise AssertionError("no op here keeps a state")

    def scratch(self, dim: str, width: int, dtype: torch.dtype = torch.float32) -> Slot:
        return _Later(self._count(dim) * width, dtype, self.device, zero=False)

    def zeros(self, dim: str, width: int) -> Slot:
        return _Later(self._count(dim) * width, torch.int32, self.device, zero=True)

    def counter(self, path: str, width: int) -> torch.Tensor:
        return torch.zeros(width, dtype=torch.int64, device=self.device)

    def _count(self, dim: str) -> int:
        return {"one": 1, "items": self.live.items}[dim] if dim in ("one", "items") else self.live.count(dim)


def run(op: Op, spec: Any, inputs: Sequence[Given], call: Call) -> list[torch.Tensor]:
    """The op's results, flat tensors of the contract's types in fresh memory; inputs in the contract's order."""
    operands: list[Operand] = []
    for i, (param, given) in enumerate(zip(op.params(spec), inputs, strict=True)):
        if isinstance(given, Packed):
            ref = WeightRef(f"{i}", GGMLType[given.format], given.n, given.k)
            call.weights[ref] = given
            operands.append(ref)
        elif isinstance(given, Cache):
            call.caches.append(given)
            operands.append(CacheRef(len(call.caches) - 1))
        elif param.kind == "weight":
            ref = WeightRef(f"{i}", GGMLType.F32, 1, given.numel())
            call.vectors[ref] = given.reshape(-1)
            operands.append(ref)
        else:
            value = Value(i, param.kind, param.dims(spec), param.name)
            call.slots[i] = Slot(given.reshape(-1))
            operands.append(value)
    start = len(operands)
    results = [Value(i, r.kind, r.dims(spec), r.name) for i, r in enumerate(op.results(spec), start)]
    node = Node(op, spec, tuple(operands), tuple(results), op.name)
    # Kernels start on the current device, which need not be that of the tensors.
    with torch.cuda.device(call.device) if call.device.type == "cuda" else nullcontext():
        for choice in lower(Program((node,), {}, {}, ()), REGISTRY):
            for value in choice.node.outputs:
                size = 1
                for d in value.dims:
                    size *= call.live.count(d) if isinstance(d, str) else d
                dtype = dtype_of(value.kind, DTYPES[call.compute])
                call.slots.setdefault(value.id, Slot(torch.empty(size, dtype=dtype, device=call.device)))
            choice.implementation.build(call, choice.node)(call.live)
    return [call.slots[v.id].tensor for v in results]
