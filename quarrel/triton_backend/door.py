"""One op on host arrays, through the same launchers as a step: the door for tests, fuzzers and QUARREL_CHECK."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quarrel.errors import RequestError
from quarrel.gguf import FORMATS
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
from quarrel.triton_backend.cache import from_host, to_host
from quarrel.triton_backend.inputs import item_starts
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime import DTYPES, Live, Slot, Work
from quarrel.triton_backend.weights import Weights


class _Given:
    """The weights that came with the call."""

    def __init__(self, weights: dict[str, RawWeight]) -> None:
        self._weights = weights

    def raw(self, ref: WeightRef) -> RawWeight:
        return self._weights[ref.name]


def run_op(
    registry: Registry, device: torch.device, op: Op, spec: Any, inputs: Sequence[Concrete], compute: Compute
) -> tuple[Concrete, ...]:
    """Results in the contract's order and types, then the consumed cache; buffers start as NaN."""
    params = op.params(spec)
    if len(params) != len(inputs):
        raise RequestError(f"{op.name} takes {[p.name for p in params]}, got {len(inputs)} arguments")
    free: dict[str, int] = {}
    for param, given in zip(params, inputs):
        _check(op, spec, param, given, free)
    if "S1" in free:
        free.setdefault("S", free["S1"] - 1)
    named = {p.name: i for p, i in zip(params, inputs)}
    _check_indices(op, spec, named, free)

    act = DTYPES[compute]
    # A composite has several parameters of one name.
    weights = {f"{i}.{p.name}": g for i, (p, g) in enumerate(zip(params, inputs)) if isinstance(g, RawWeight)}
    operands = [_operand(i, p, spec, given) for i, (p, given) in enumerate(zip(params, inputs))]
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
    live, work = _live(named, free, device)
    rows = {"T": live.T, "S": live.S, "R": live.R, "items": max(live.items, 1)}
    kept = {v.id for v in outputs}
    held = Weights(_Given(weights), device, compute)
    plan = Plan(lower(program, registry), arrays, kept, rows, held, caches, states, work, compute, device)
    plan.fill(255)
    for go in plan.launches:
        go(live)
    results: tuple[Concrete, ...] = tuple(_to_host(plan.slots[v.id].tensor, v, free) for v in outputs)
    if not op.consumes:
        return results
    return (*results, to_host(caches[0]) if caches else states[0].cpu().numpy().copy())


def _operand(i: int, param: Param, spec: Any, given: Concrete) -> Operand:
    if isinstance(given, RawWeight):
        return WeightRef(f"{i}.{param.name}", given.type, len(given.raw), given.k)
    if isinstance(given, KVArrays):
        return CacheRef(0)
    if param.kind == "state":
        return StateRef(0)
    if param.kind == "const":
        return ConstRef(param.name, tuple(float(x) for x in given))
    return Value(i, param.kind, tuple(param.dims(spec)), param.name)


def _to_device(given: Concrete, kind: str, act: torch.dtype, device: torch.device) -> torch.Tensor:
    assert isinstance(given, np.ndarray)
    tensor = torch.from_numpy(given.reshape(-1).copy()).to(device)
    return tensor.to(act) if kind == "act" else tensor


def _to_host(flat: torch.Tensor, value: Value, free: dict[str, int]) -> Array:
    shape = tuple(free[d] if isinstance(d, str) else d for d in value.dims)
    size = int(np.prod(shape, dtype=np.int64))
    tensor = flat[:size].float() if value.kind == "act" else flat[:size]
    return tensor.cpu().numpy().reshape(shape).copy()


def _live(named: dict[str, Concrete], free: dict[str, int], device: torch.device) -> tuple[Live, Work]:
    """Counts and tables of the call; the block table is as wide as it comes."""
    counts = [free.get(axis, 0) for axis in ("T", "S", "R")]
    starts, new = np.zeros(1, np.int32), np.zeros(0, np.int32)
    if "query_start" in named:
        query_start, kv_len = named["query_start"], named.get("kv_len", np.zeros(free["S"], np.int32))
        assert isinstance(query_start, np.ndarray)
        assert isinstance(kv_len, np.ndarray)
        starts, new = item_starts(query_start, kv_len), np.diff(query_start)
    live = Live(*counts, bool((new == 1).any()), bool((new > 1).any()), int(starts[-1]))
    width = torch.tensor([free.get("B", 0)], dtype=torch.int32, device=device)
    return live, Work(Slot(torch.from_numpy(starts).to(device)), Slot(width))


def _check(op: Op, spec: Any, param: Param, given: Concrete, free: dict[str, int]) -> None:
    """Type, shape and layout of one argument; free axes are bound as they are met."""
    dims = param.dims(spec)
    wanted = ", ".join(str(free.get(d, d)) if isinstance(d, str) else str(d) for d in dims)
    what = f"{op.name}: {param.name}"
    if param.kind == "weight":
        if not isinstance(given, RawWeight):
            raise RequestError(f"{what} is {type(given).__name__}, wanted raw weight rows [{wanted}]")
        _check_raw(what, given)
        found: tuple[int, ...] = (len(given.raw), given.k) if len(dims) == 2 else (len(given.raw) * given.k,)
    elif param.kind == "cache":
        if not isinstance(given, KVArrays) or given.k.shape != given.v.shape or given.k.ndim != 4:
            raise RequestError(f"{what} is no pair of [C, block_size, n_kv, head_dim] arrays")
        return
    elif param.kind == "state":
        if not isinstance(given, np.ndarray) or given.dtype != np.float32 or given.shape[1:] != spec.state:
            raise RequestError(f"{what} is no float32 array [slots, {', '.join(map(str, spec.state))}]")
        return
    else:
        if not isinstance(given, np.ndarray):
            raise RequestError(f"{what} is {type(given).__name__}, wanted an array [{wanted}]")
        dtype = np.dtype(np.int32 if param.kind == "i32" else np.float32)
        if given.dtype != dtype or not given.flags.c_contiguous:
            layout = "contiguous" if given.flags.c_contiguous else "strided"
            raise RequestError(
                f"{what} is {layout} {given.dtype}, wanted contiguous {dtype}: copy it with np.ascontiguousarray"
            )
        found = given.shape
    sizes = [free.setdefault(d, f) if isinstance(d, str) else d for f, d in zip(found, dims)]
    bound = len(found) == len(dims) and list(found) == sizes
    if not bound:
        raise RequestError(f"{what} has shape {list(found)}, wanted [{wanted}]")


def _check_raw(what: str, weight: RawWeight) -> None:
    raw = weight.raw
    if raw.dtype != np.uint8 or raw.ndim != 2:
        raise RequestError(
            f"{what} holds a {raw.ndim}-d array of {raw.dtype}, wanted raw blocks [rows, row_bytes] of uint8"
        )
    block = FORMATS[weight.type]
    row_bytes = weight.k // block.elements * block.nbytes
    if weight.k % block.elements or raw.shape[1] != row_bytes:
        raise RequestError(
            f"{what} has rows of {raw.shape[1]} bytes for {weight.k} values of {weight.type.name}, wanted {row_bytes} bytes"
        )


def _check_indices(op: Op, spec: Any, named: dict[str, Concrete], free: dict[str, int]) -> None:
    """Everything that a kernel would follow as an address."""

    def within(name: str, stop: int) -> None:
        given = named.get(name)
        if isinstance(given, np.ndarray) and given.size and (given.min() < 0 or given.max() >= stop):
            raise RequestError(f"{op.name}: {name} lies in {given.min()}..{given.max()}, wanted 0..{stop - 1}")

    cache = named.get("cache")
    if isinstance(cache, KVArrays):
        blocks, size = cache.k.shape[:2]
        inner = spec.append if hasattr(spec, "append") else spec
        if cache.k.shape[2:] != (inner.n_kv, inner.head_dim):
            raise RequestError(
                f"{op.name}: the cache holds {list(cache.k.shape[2:])} a token, wanted [{inner.n_kv}, {inner.head_dim}]"
            )
        within("slots", blocks * size)
        within("block_table", blocks)
        within("kv_len", size * free.get("B", 0) + 1)
    state = named.get("state")
    if isinstance(state, np.ndarray):
        within("state_slots", len(state))
    if op.name == "embedding":
        within("ids", spec.n)
    if hasattr(spec, "n_experts"):
        within("ids", spec.n_experts)
    within("rows", free.get("T", 0))
    starts = named.get("query_start")
    if isinstance(starts, np.ndarray):
        sound = len(starts) == free["S"] + 1 and starts[0] == 0 and starts[-1] == free["T"] and (np.diff(starts) >= 0).all()
        if not sound:
            raise RequestError(f"{op.name}: query_start does not rise from 0 to {free['T']} in {free['S']} steps")
