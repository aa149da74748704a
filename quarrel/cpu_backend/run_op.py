"""One op on host arrays: a program of a single node, compiled and run once. For tests, fuzzers and QUARREL_CHECK."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quarrel.cpu_backend.attention.cache import Cache, kind_of, new_cache, to_host
from quarrel.cpu_backend.runtime.pool import Pool
from quarrel.cpu_backend.step import Compiled
from quarrel.errors import RequestError
from quarrel.gguf import FORMATS
from quarrel.ops.contract import Array, Concrete, ConstRef, KVArrays, Op, Operand, RawWeight, StateRef, Value, WeightRef
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Program


def run_op(op: Op, spec: object, inputs: Sequence[Concrete], exact: bool, pool: Pool) -> tuple[Concrete, ...]:
    """The op's results, and the new state of what it consumes."""
    args = _Inputs(exact)
    operands = [
        args.operand(i, p.name, p.kind, p.dims(spec), x)
        for i, (p, x) in enumerate(zip(op.params(spec), inputs, strict=True))
    ]
    results = args.builder.emit(op, spec, *operands)
    traced = args.builder.program(**{r.name: r for r in results})
    program = Program(traced.nodes, args.values, traced.outputs, traced.caches, traced.states)
    compiled = Compiled(program, args, args.caches, args.states, args.sizes, exact, pool)
    # NaN wherever nothing is written: a kernel that leaves a hole or reads one cannot go unnoticed.
    compiled.tables.arena[:] = 0xFF
    out: list[Any] = list(compiled.run(args.arrays, tuple(program.outputs)).values())
    types = [x.type for x in inputs if isinstance(x, KVArrays)]
    out += [to_host(cache, type) for cache, type in zip(args.caches, types) if op.consumes]
    return (*out, *args.states)


class _Inputs:
    """Concrete arguments turned into operands; also the source of the weights among them."""

    def __init__(self, exact: bool) -> None:
        self.builder = Builder()
        self.values: dict[str, Value] = {}
        self.arrays: dict[str, Array] = {}
        self.caches: list[Cache] = []
        self.states: list[np.ndarray] = []
        self.sizes = {"T": 0, "S": 0, "R": 0, "B": 0, "L": 0}
        self._exact = exact
        self._weights: dict[str, RawWeight] = {}

    def operand(self, i: int, name: str, kind: str, dims: tuple[int | str, ...], x: Any) -> Operand:
        if isinstance(x, KVArrays):
            kind = kind_of(x.type, self._exact)
            self.caches.append(new_cache(KVLayer.of(x), *x.k.shape[:2], kind, x))
            return self.builder.cache(KVLayer.of(x))
        if isinstance(x, RawWeight):
            block = FORMATS[x.type]
            if x.raw.shape[1] * block.elements != x.k * block.nbytes:
                raise RequestError(f"{name} has rows of {x.raw.shape[1]} bytes, which are not {x.k} of {x.type.name}")
            self._weights[f"{name}.{i}"] = x
            return WeightRef(f"{name}.{i}", x.type, len(x.raw), x.k)
        if kind == "const":
            return ConstRef(name, tuple(map(float, x)))
        if kind == "state":
            self.states.append(x.astype(np.float32))
            return self._state(x)
        self.values[name], self.arrays[name] = Value(-1000 - i, kind, dims, name), x
        if len(dims) != x.ndim:
            raise RequestError(f"{name} has shape {x.shape}, wanted {len(dims)} axes ({', '.join(map(str, dims))})")
        for axis, size in zip(dims, x.shape):
            self._size(name, *(("S", size - 1) if axis == "S1" else (axis, size)))
        return self.values[name]

    def _size(self, name: str, axis: int | str, size: int) -> None:
        known = self.sizes.get(axis) if isinstance(axis, str) else axis
        if known not in (0, None, size):
            raise RequestError(f"{name} has {size} along axis {axis}, where the op or its other inputs have {known}")
        if isinstance(axis, str):
            self.sizes[axis] = size

    def _state(self, x: Array) -> StateRef:
        return self.builder.state(*x.shape[1:])

    def raw(self, ref: WeightRef) -> RawWeight:
        return self._weights[ref.name]
