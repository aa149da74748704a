"""The NumPy reference run on whole ops and whole programs: slow, float64 inside, and the only oracle in the project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quarrel.ops.contract import Array, CacheRef, Concrete, ConstRef, KVArrays, Op, Operand, StateRef, Value, WeightRef
from quarrel.ops.kv import KVType
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Node, Program
from quarrel.ops.rounding import Shake
from quarrel.ops.step import StepInputs, WeightSource


def empty_cache(layer: KVLayer, blocks: int, block_size: int, type: KVType = "auto", fill: float = 0.0) -> KVArrays:
    """A layer's keys and values, `fill` everywhere."""
    dims = (layer.head_dim, layer.value_dim)
    k, v = (np.full((blocks, block_size, layer.n_kv, dim), fill, np.float32) for dim in dims)
    return KVArrays(k, v, type)


def run_op(op: Op, spec: Any, inputs: Sequence[Concrete], shake: Shake | None = None) -> tuple[Concrete, ...]:
    """One op on concrete arrays; a composite runs as the references of its expansion. `shake` changes each `act` input of
    a primitive."""
    if op.reference is not None:
        if shake is not None:
            pairs = zip(op.params(spec), inputs, strict=True)
            inputs = [shake(op, x) if p.kind == "act" and isinstance(x, np.ndarray) else x for p, x in pairs]
        return op.reference(spec, *inputs)
    builder = Builder()
    operands: list[Operand] = []
    bound: dict[int, Concrete] = {}
    for i, (param, given) in enumerate(zip(op.params(spec), inputs, strict=True)):
        operand = _stand_in(i, param.kind, param.name, param.dims(spec), given)
        operands.append(operand)
        bound[id(operand)] = given
    assert op.expand is not None
    outputs = op.expand(builder, spec, operands)
    program = builder.program()
    stored = {o: bound[id(o)] for o in operands if isinstance(o, CacheRef | StateRef)}
    values: dict[int, Array] = {}

    def fetch(operand: Operand) -> Concrete:
        if isinstance(operand, CacheRef | StateRef):
            return stored[operand]
        return bound[id(operand)] if id(operand) in bound else values[operand.id]  # type: ignore[union-attr]

    for node in program.nodes:
        _run_node(node, fetch, values, stored, shake)
    results: tuple[Concrete, ...] = tuple(values[v.id] for v in outputs)
    return (*results, *stored.values()) if op.consumes else results


def _stand_in(i: int, kind: str, name: str, dims: tuple[Any, ...], given: Concrete) -> Operand:
    if kind == "weight":
        assert not isinstance(given, (np.ndarray, KVArrays))
        return WeightRef(name, given.type, len(given.raw), given.k)
    if kind == "cache":
        return CacheRef(0)
    if kind == "state":
        return StateRef(i)
    if kind == "const":
        return ConstRef(name, tuple(float(x) for x in given))  # type: ignore[union-attr]
    return Value(-1 - i, kind, dims, name)  # type: ignore[arg-type]


def run_program(
    program: Program,
    weights: WeightSource,
    caches: list[KVArrays],
    inputs: StepInputs,
    states: Sequence[Array] = (),
    shake: Shake | None = None,
) -> Mapping[str, Array]:
    """The program's outputs by name. `caches` and `states` (each `[slots, ...]`) are updated in place.

    `tokens` is left out unless `inputs.sample` is there. `shake` as in `run_op`.
    """
    values = bind_inputs(program, inputs)
    stored: dict[CacheRef | StateRef, Concrete] = {CacheRef(i): cache for i, cache in enumerate(caches)}
    stored |= {StateRef(i): state for i, state in enumerate(states)}

    def fetch(operand: Operand) -> Concrete:
        if isinstance(operand, WeightRef):
            return weights.raw(operand)
        if isinstance(operand, ConstRef):
            return np.array(operand.data, np.float32)
        return stored[operand] if isinstance(operand, CacheRef | StateRef) else values[operand.id]

    for node in program.nodes:
        if all(not isinstance(i, Value) or i.id in values for i in node.inputs):
            _run_node(node, fetch, values, stored, shake)
    caches[:] = [stored[CacheRef(i)] for i in range(len(caches))]  # type: ignore[misc]
    for i, state in enumerate(states):
        state[:] = stored[StateRef(i)]
    return {name: values[v.id] for name, v in program.outputs.items() if v.id in values}


def bind_inputs(program: Program, inputs: StepInputs) -> dict[int, Array]:
    """The step's arrays by value id; sampling inputs only if they are there."""
    values: dict[int, Array] = {}
    for name, value in program.inputs.items():
        array = inputs.named(name)
        if array is not None:
            empty = array.ndim == 2 and not len(array)  # no masks, of whichever width
            values[value.id] = array.reshape(0, int(value.dims[1])) if empty else array
    return values


def _run_node(
    node: Node,
    fetch: Any,
    values: dict[int, Array],
    stored: dict[CacheRef | StateRef, Concrete],
    shake: Shake | None = None,
) -> None:
    results = list(run_op(node.op, node.spec, [fetch(i) for i in node.inputs], shake))
    if node.op.consumes:
        refs = [i for i in node.inputs if isinstance(i, CacheRef | StateRef)]
        stored.update(zip(refs, results[-len(refs) :], strict=True))
        del results[-len(refs) :]
    for value, result in zip(node.outputs, results, strict=True):
        values[value.id] = result  # type: ignore[assignment]
