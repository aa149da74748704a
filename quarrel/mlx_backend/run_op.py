"""One op on host arrays, through the same families as a step: what tests, fuzzers and QUARREL_CHECK call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from quarrel.mlx_backend.plan import Plan, Resident
from quarrel.mlx_backend.runtime.cache import from_host, refuse_type, to_host
from quarrel.mlx_backend.runtime.launch import DTYPES, Batch, Cache, batch_of
from quarrel.mlx_backend.weights import Weights
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
from quarrel.ops.kv import KVType
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import Registry, lower
from quarrel.ops.weights import CallWeights


def run_op(
    registry: Registry,
    op: Op,
    spec: Any,
    inputs: Sequence[Concrete],
    compute: Compute,
    batch: Batch | None = None,
) -> tuple[Concrete, ...]:
    """Results in the contract's order and types, then the consumed caches and states.

    Rows of an op that knows no sequences are taken as one sequence's, unless `batch` says otherwise.
    """
    free = bind_axes(op, spec, inputs)
    params = op.params(spec)
    # A composite has several parameters of one name.
    given = {f"{i}.{p.name}": g for i, (p, g) in enumerate(zip(params, inputs)) if isinstance(g, RawWeight)}
    operands = [_operand(i, p, spec, g) for i, (p, g) in enumerate(zip(params, inputs))]
    outputs = tuple(
        Value(i, r.kind, tuple(r.dims(spec)), r.name) for i, r in enumerate(op.results(spec), start=len(operands))
    )
    values = {o.name: o for o in operands if isinstance(o, Value)}
    program = Program((Node(op, spec, tuple(operands), outputs, op.name),), values, {}, ())
    plan = Plan(lower(program, registry), Weights(CallWeights(given), compute), compute)

    arrays: dict[int, mx.array] = {}
    resident: Resident = {}
    block_size = 32
    kept_as: KVType = "auto"
    for operand, g in zip(operands, inputs):
        if isinstance(operand, CacheRef):
            assert isinstance(g, KVArrays)
            refuse_type(g.type, compute)
            resident[operand], block_size, kept_as = from_host(g, DTYPES[compute]), g.k.shape[1], g.type
        elif isinstance(operand, StateRef):
            resident[operand] = mx.array(g)
        elif isinstance(operand, Value):
            array = mx.array(g)
            arrays[operand.id] = array.astype(plan.act) if operand.kind == "act" else array
    named = {p.name: g for p, g in zip(params, inputs)}
    starts = named.get("query_start")
    assert starts is None or isinstance(starts, np.ndarray)
    found = batch or batch_of(starts, None, free.get("T", 0), free.get("R", 0), block_size, kept_as)
    got, after = plan.run(found, arrays, resident, outputs)
    results: list[Concrete] = [_to_host(a, v, free) for a, v in zip(got, outputs)]
    if op.consumes:
        results += [to_host(x, block_size, kept_as) if isinstance(x, Cache) else np.array(x) for x in after.values()]
    return tuple(results)


def _operand(i: int, param: Param, spec: Any, given: Concrete) -> Operand:
    if isinstance(given, RawWeight):
        return WeightRef(f"{i}.{param.name}", given.type, len(given.raw), given.k)
    if isinstance(given, KVArrays):
        return CacheRef(i)
    if param.kind == "state":
        return StateRef(i)
    if param.kind == "const":
        return ConstRef(param.name, tuple(float(x) for x in given))
    return Value(i, param.kind, tuple(param.dims(spec)), param.name)


def _to_host(array: mx.array, value: Value, free: dict[str, int]) -> Array:
    shape = tuple(free[d] if isinstance(d, str) else d for d in value.dims)
    assert array.shape == shape, (value, array.shape, shape)
    wanted = mx.int32 if value.kind == "i32" else mx.float32
    assert value.kind == "act" or array.dtype == wanted, (value, array.dtype)
    return np.array(array.astype(wanted))
