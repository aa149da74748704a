"""The null backend: runs any assembly on arrays that hold nothing, and checks every axis and kind on the way.

What it leaves behind is the `Program`: so building a model for a real backend and checking an assembly with no torch and
no MLX in sight are the same act.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quarrel.ops.contract import CacheRef, ConstRef, Dim, Op, Operand, Param, StateRef, Value, WeightRef
from quarrel.ops.program import STEP_INPUTS, KVLayer, Node, Program, StateLayer

if TYPE_CHECKING:
    from collections.abc import Iterator


class Builder:
    """Collects nodes. One builder traces one program; `expand` uses a fresh one for a composite's body."""

    def __init__(self, first_id: int = 0) -> None:
        self._next = first_id
        self._nodes: list[Node] = []
        self._inputs: dict[str, Value] = {}
        self._caches: list[KVLayer] = []
        self._states: list[StateLayer] = []
        self._path: list[str] = []

    def input(self, name: str, width: int = 0) -> Value:
        """A step input from `STEP_INPUTS`, with rows of so many values; asking twice gives the same value."""
        if name not in self._inputs:
            kind, axes = STEP_INPUTS[name]
            axes = f"{axes} {width}" if width else axes
            self._inputs[name] = self._value(Param(name, kind, axes), None)  # type: ignore[arg-type]
        return self._inputs[name]

    def input_like(self, name: str, value: Value) -> Value:
        """The same step input of another program, with its width."""
        return self.input(name, *map(int, value.dims[len(STEP_INPUTS[name][1].split()) :]))

    def cache(self, layer: KVLayer) -> CacheRef:
        """A new key/value cache."""
        self._caches.append(layer)
        return CacheRef(len(self._caches) - 1)

    def state(self, *shape: int) -> StateRef:
        """A new recurrent state of this shape for every sequence."""
        self._states.append(StateLayer(shape))
        return StateRef(len(self._states) - 1)

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Names the part of the model that the calls inside belong to."""
        self._path.append(name)
        try:
            yield
        finally:
            self._path.pop()

    def emit(self, op: Op, spec: Any, *inputs: Operand) -> tuple[Value, ...]:
        """Appends one call after checking every input against the contract."""
        where = f"{'.'.join(self._path)}: {op.name}"
        if type(spec) is not op.spec:
            raise TypeError(f"{where} wants a {op.spec.__name__}, got {type(spec).__name__}")
        params = op.params(spec)
        if len(params) != len(inputs):
            raise TypeError(f"{where} takes {[p.name for p in params]}, got {len(inputs)} arguments")
        free: dict[str, Dim] = {}
        for param, operand in zip(params, inputs):
            _check(where, param, param.dims(spec), operand, free)
        outputs = tuple(self._value(r, spec, free) for r in op.results(spec))
        self._nodes.append(Node(op, spec, tuple(inputs), outputs, ".".join(self._path)))
        return outputs

    def program(self, **outputs: Value) -> Program:
        """The finished program."""
        return Program(tuple(self._nodes), dict(self._inputs), outputs, tuple(self._caches), tuple(self._states))

    def _value(self, param: Param, spec: Any, free: dict[str, Dim] | None = None) -> Value:
        dims = tuple((free or {}).get(d, d) if isinstance(d, str) else d for d in param.dims(spec))
        value = Value(self._next, param.kind, dims, param.name)
        self._next += 1
        return value


def expand(node: Node, first_id: int) -> tuple[list[Node], int]:
    """The body of a composite node as smaller nodes that write the same outputs, and the next free value id."""
    assert node.op.expand is not None, node.op
    builder = Builder(first_id)
    with builder.at(node.path or node.op.name):
        produced = node.op.expand(builder, node.spec, node.inputs)
    assert len(produced) == len(node.outputs), (node.op, produced)
    for made, declared in zip(produced, node.outputs):
        assert made.dims == declared.dims, f"{node.op.name} expands to {made!r}, its contract says {declared!r}"
    rename = {made.id: declared for made, declared in zip(produced, node.outputs)}
    return [_renamed(n, rename) for n in builder._nodes], builder._next


def _renamed(node: Node, rename: dict[int, Value]) -> Node:
    def of(values: Sequence[Operand]) -> tuple[Any, ...]:
        return tuple(rename.get(v.id, v) if isinstance(v, Value) else v for v in values)

    return Node(node.op, node.spec, of(node.inputs), of(node.outputs), node.path)


def _check(where: str, param: Param, dims: tuple[Dim, ...], operand: Operand, free: dict[str, Dim]) -> None:
    if isinstance(operand, WeightRef):
        found: tuple[Dim, ...] = (operand.rows, operand.k) if len(dims) == 2 else (operand.rows * operand.k,)
        kinds: tuple[str, ...] = ("weight",)
    elif isinstance(operand, ConstRef):
        found, kinds = (len(operand.data),), ("const",)
    elif isinstance(operand, CacheRef):
        found, kinds = (), ("cache",)
    elif isinstance(operand, StateRef):
        found, kinds = dims, ("state",)
    else:
        # A float32 value may be read where an activation is wanted: the residual stream is kept in float32.
        found, kinds = operand.dims, (("f32", "act") if operand.kind == "f32" else (operand.kind,))
    if param.kind not in kinds:
        raise TypeError(f"{where}: {param.name} wants a {param.kind}, got {operand!r}")
    wanted = tuple(free.get(d, d) if isinstance(d, str) else d for d in dims)
    same = len(found) == len(dims)
    bound = same and all(f == free.get(d, f if isinstance(d, str) else d) for f, d in zip(found, dims))  # type: ignore[arg-type]
    if not bound:
        raise TypeError(f"{where}: {param.name} wants [{', '.join(map(str, wanted))}], got {operand!r}")
    free.update({d: f for d, f in zip(dims, found) if isinstance(d, str)})
