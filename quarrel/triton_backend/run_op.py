"""One op on host arrays, through the same launchers as a step: what tests, fuzzers and QUARREL_CHECK call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from quarrel.ops.arguments import bind_axes
from quarrel.ops.contract import (
    Array,
    CacheRef,
    Compute,
    Concrete,
    ConstRef,
    KVArrays,
    Op,
    Operand,
    Param,
    RawWeight,
    StateRef,
    Value,
    WeightRef,
)
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import Registry, lower
from quarrel.ops.weights import CallWeights
from quarrel.triton_backend.formats.weights import Weights
from quarrel.triton_backend.inputs import batch_of, item_starts
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.arrays import DTYPES, Slot
from quarrel.triton_backend.runtime.cache import from_host, to_host
from quarrel.triton_backend.runtime.site import Batch, Tables


@dataclass(frozen=True)
class Bound:
    """An op on inputs that lie on the device, built; each call launches it once more. Its buffers start as NaN."""

    plan: Plan
    batch: Batch
    results: tuple[Value, ...]
    free: Mapping[str, int]

    def __call__(self) -> None:
        for go in self.plan.launches:
            go(self.batch)


def bind(
    registry: Registry, device: torch.device, op: Op, spec: Any, inputs: Sequence[Concrete], compute: Compute
) -> Bound:
    """Puts the inputs on the device and builds the op for them."""
    free = bind_axes(op, spec, inputs)
    params = op.params(spec)
    named = {p.name: i for p, i in zip(params, inputs)}

    act = DTYPES[compute]
    # A composite has several parameters of one name.
    weights = {f"{i}.{p.name}": g for i, (p, g) in enumerate(zip(params, inputs)) if isinstance(g, RawWeight)}
    places = {i: n for n, i in enumerate(i for i, p in enumerate(params) if p.kind == "state")}
    operands = [_operand(i, p, spec, given, places.get(i, 0)) for i, (p, given) in enumerate(zip(params, inputs))]
    arrays = {o.id: Slot(_to_device(g, o.kind, act, device)) for o, g in zip(operands, inputs) if isinstance(o, Value)}
    states = [
        _to_device(g, "f32", act, device).view(g.shape)
        for p, g in zip(params, inputs)
        if p.kind == "state"  # type: ignore[union-attr]
    ]
    caches = [from_host(g, act, device) for g in inputs if isinstance(g, KVArrays)]
    outputs = tuple(
        Value(i, r.kind, tuple(r.dims(spec)), r.name) for i, r in enumerate(op.results(spec), start=len(operands))
    )
    values = {o.name: o for o in operands if isinstance(o, Value)}
    program = Program((Node(op, spec, tuple(operands), outputs, op.name),), values, {}, ())
    batch, work = _live(named, free, device)
    rows = {"T": batch.T, "S": batch.S, "R": batch.R, "items": max(batch.items, 1)}
    kept = {v.id for v in outputs}
    packed = Weights(CallWeights(weights), device, compute)
    plan = Plan(lower(program, registry), arrays, kept, rows, packed, caches, states, work, compute, device)
    plan.fill(255)
    return Bound(plan, batch, outputs, free)


def run_op(
    registry: Registry, device: torch.device, op: Op, spec: Any, inputs: Sequence[Concrete], compute: Compute
) -> tuple[Concrete, ...]:
    """Results in the contract's order and types, then the consumed cache."""
    bound = bind(registry, device, op, spec, inputs, compute)
    bound()
    plan = bound.plan
    results: tuple[Concrete, ...] = tuple(_to_host(plan.slots[v.id].tensor, v, bound.free) for v in bound.results)
    if not op.consumes:
        return results
    types = [g.type for g in inputs if isinstance(g, KVArrays)]
    return (*results, *map(to_host, plan.caches, types), *(s.cpu().numpy().copy() for s in plan.states))


def _operand(i: int, param: Param, spec: Any, given: Concrete, state: int) -> Operand:
    if isinstance(given, RawWeight):
        return WeightRef(f"{i}.{param.name}", given.type, len(given.raw), given.k)
    if isinstance(given, KVArrays):
        return CacheRef(0)
    if param.kind == "state":
        return StateRef(state)
    if param.kind == "const":
        return ConstRef(param.name, tuple(float(x) for x in given))
    return Value(i, param.kind, tuple(param.dims(spec)), param.name)


def _to_device(given: Concrete, kind: str, act: torch.dtype, device: torch.device) -> torch.Tensor:
    assert isinstance(given, np.ndarray)
    tensor = torch.from_numpy(given.reshape(-1).copy()).to(device)
    return tensor.to(act) if kind == "act" else tensor


def _to_host(flat: torch.Tensor, value: Value, free: Mapping[str, int]) -> Array:
    shape = tuple(free[d] if isinstance(d, str) else d for d in value.dims)
    size = int(np.prod(shape, dtype=np.int64))
    tensor = flat[:size].float() if value.kind == "act" else flat[:size]
    return tensor.cpu().numpy().reshape(shape).copy()


def _live(named: dict[str, Concrete], free: dict[str, int], device: torch.device) -> tuple[Batch, Tables]:
    """Counts and tables of the call; the block table is as wide as it comes."""
    counts = [free.get(axis, 0) for axis in ("T", "S", "R")]
    starts, batch = np.zeros(1, np.int32), Batch(*counts, False, False, 0)
    if "query_start" in named:
        query_start, kv_len = named["query_start"], named.get("kv_len", np.zeros(free["S"], np.int32))
        assert isinstance(query_start, np.ndarray)
        assert isinstance(kv_len, np.ndarray)
        starts = item_starts(query_start, kv_len)
        batch = replace(batch_of(query_start, kv_len, counts[2], starts), T=counts[0])
    batch = replace(batch, adjusts="list_end" in named)
    width = torch.tensor([free.get("B", 0)], dtype=torch.int32, device=device)
    return batch, Tables(Slot(torch.from_numpy(starts).to(device)), Slot(width))
