"""A rank's program: the model's, traced on cut tensors, with the sums that make whole results of the ranks' parts.

A product with a matrix whose columns are cut is a part of a sum. It is summed where it is added to the stream, or at once
if anything else reads it; parts that are added to each other are summed together. Where whole layers are divided, a rank
keeps its own, and the stream is handed on after the last of each rank's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from quarrel.models.cut import CutTensors, Range, aligned_range
from quarrel.ops.activation import GatedSpec, gated
from quarrel.ops.collective import all_gather, all_reduce, all_reduce_add, broadcast, place
from quarrel.ops.contract import CacheRef, Operand, StateRef, Value, WeightRef
from quarrel.ops.linear import ADD, LINEAR, LINEAR_ADD, add, linear
from quarrel.ops.mixer import MAMBA2_MIX, Mamba2MixSpec
from quarrel.ops.moe import EXPERT_DOWN
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Node, Program
from quarrel.ops.state import CONV, SCAN2

_LAYER = re.compile(r"blk\.(\d+)\.")
_MATRIX = {LINEAR.name: 1, LINEAR_ADD.name: 2, EXPERT_DOWN.name: 3}
"""The ops that may have a matrix of cut columns, and which operand it is."""


def with_collectives(program: Program, tensors: CutTensors, owners: Sequence[int] | None = None) -> Program:
    """The program of `tensors.rank`. owners: the rank that computes each layer, where layers are divided."""
    return _Rank(program, tensors).run(owners)


class _Rank:
    """Emits the nodes of a program once more, with what they lack for one rank."""

    def __init__(self, program: Program, tensors: CutTensors) -> None:
        self._program, self._tensors, self._b = program, tensors, Builder()
        self._values: dict[int, Value] = {}  # by the id in the traced program
        self._inputs = {value.id: name for name, value in program.inputs.items()}
        self._refs: dict[CacheRef | StateRef, CacheRef | StateRef] = {}
        self._parts: set[int] = set()  # ids of new values that are still to be summed
        self._readers: dict[int, list[Node]] = {}
        for node in program.nodes:
            for operand in node.inputs:
                if isinstance(operand, Value):
                    self._readers.setdefault(operand.id, []).append(node)

    def run(self, owners: Sequence[int] | None) -> Program:
        rank = self._tensors.rank

        def owner(node: Node) -> int | None:
            if owners is None or node.path in ("output", "per_layer"):  # every rank's
                return None
            layer = _LAYER.match(node.path)
            return owners[int(layer[1]) if layer else 0]

        for source, run in groupby(self._program.nodes, owner):
            nodes = list(run)
            for node in nodes if source in (None, rank) else ():
                with self._b.at(node.path):
                    made = self._emit(node, [self._operand(o) for o in node.inputs])
                self._values.update(zip((v.id for v in node.outputs), made, strict=True))
            if source is not None:
                (h,) = nodes[-1].outputs
                with self._b.at(f"{nodes[-1].path.rpartition('.')[0]}.out"):
                    self._values[h.id] = broadcast(self._b, self._values.get(h.id), int(h.dims[1]), source)
        return self._b.program(**{name: self._values[v.id] for name, v in self._program.outputs.items()})

    def _operand(self, o: Operand) -> Operand:
        if isinstance(o, Value):
            return self._b.input_like(self._inputs[o.id], o) if o.id in self._inputs else self._values[o.id]
        if isinstance(o, CacheRef | StateRef) and o not in self._refs:
            self._refs[o] = (
                self._b.cache(self._program.caches[o.layer])
                if isinstance(o, CacheRef)
                else self._b.state(*self._program.states[o.index].shape)
            )
        return self._refs[o] if isinstance(o, CacheRef | StateRef) else o

    def _emit(self, node: Node, inputs: list[Operand]) -> tuple[Value, ...]:
        at = _MATRIX.get(node.op.name)
        matrix = None if at is None else inputs[at]
        assert matrix is None or isinstance(matrix, WeightRef)
        if matrix is not None and self._tensors.sums(matrix):
            return (self._product(node, inputs),)
        if node.op is ADD and self._is_part(inputs[1]):
            return (all_reduce_add(self._b, inputs[0], inputs[1], node.spec.scale),)  # type: ignore[arg-type]
        if node.op is LINEAR and node.path == "output":
            return (self._logits(*inputs),)  # type: ignore[arg-type]
        if node.op is MAMBA2_MIX:
            gain = inputs[8 if node.spec.conv_bias else 7]
            assert isinstance(gain, WeightRef)
            if self._tensors.sums(gain):
                return (self._gathered_mix(node.spec, inputs),)
        return self._b.emit(node.op, node.spec, *inputs)

    def _is_part(self, o: Operand) -> bool:
        return isinstance(o, Value) and o.id in self._parts

    def _product(self, node: Node, inputs: list[Operand]) -> Value:
        """A part of a sum: added to the stream as a whole, or left a part for what adds it later."""
        b = self._b
        if node.op is EXPERT_DOWN:
            (y,) = b.emit(node.op, node.spec, *inputs)
        elif node.op is LINEAR_ADD and self._is_part(inputs[0]):
            if self._gathered(*inputs[1:3]):  # type: ignore[arg-type]
                y = add(b, inputs[0], self._columns(*inputs[1:]), node.spec.scale)  # type: ignore[arg-type]
            else:
                (y,) = b.emit(node.op, node.spec, *inputs)
        elif node.op is LINEAR_ADD:
            part = self._columns(*inputs[1:])  # type: ignore[arg-type]
            return all_reduce_add(b, inputs[0], part, node.spec.scale)  # type: ignore[arg-type]
        else:
            y = self._columns(*inputs)  # type: ignore[arg-type]
        (result,) = node.outputs
        if not all(self._adds(reader, result) for reader in self._readers.get(result.id, ())):
            return all_reduce(b, y)
        self._parts.add(y.id)
        return y

    def _adds(self, node: Node, part: Value) -> bool:
        """Whether a node adds this part to the stream, or a part to this part."""
        if node.op is LINEAR_ADD:
            matrix = node.inputs[2]
            assert isinstance(matrix, WeightRef)
            return node.inputs[0] is part and node.inputs[1] is not part and self._tensors.sums(matrix)
        return node.op is ADD and node.inputs[1] is part and node.inputs[0] is not part

    def _gathered(self, x: Value, weight: WeightRef) -> bool:
        """Whether x has all columns, where the matrix has a part of them."""
        return x.dims[1] != weight.k

    def _columns(self, x: Value, weight: WeightRef, bias: WeightRef | None = None) -> Value:
        """The product with the rank's columns; where x was gathered, that with its rows instead, in their place."""
        whole = self._tensors.uncut(weight)
        if not self._gathered(x, weight):
            return linear(self._b, x, weight, bias, out="f32")
        assert bias is None
        rows = aligned_range(whole.rows, self._tensors.rank, self._tensors.ranks)
        return place(self._b, linear(self._b, x, _rows(whole, rows), out="f32"), rows[0], whole.rows)

    def _logits(self, hidden: Value, head: WeightRef, bias: WeightRef | None = None) -> Value:
        """Each rank scores its rows of the vocabulary."""
        rows = aligned_range(head.rows, self._tensors.rank, self._tensors.ranks)
        # A vector is one row; seen as a column it is cut like a weight.
        own = None if bias is None else _rows(WeightRef(bias.name, bias.type, bias.k, 1, bias.start), rows)
        return all_gather(self._b, linear(self._b, hidden, _rows(head, rows), own, out="f32"), rows[0], head.rows)

    def _gathered_mix(self, s: Mamba2MixSpec, inputs: list[Operand]) -> Value:
        """A Mamba-2 mixer whose one group is divided: its norm needs the channels of all ranks."""
        b = self._b
        xbc, dt, z, *conv, dt_bias, a, d, gain, starts, keys, slots, conv_state, state = inputs
        ragged = (starts, keys, slots)
        assert isinstance(gain, WeightRef)
        assert isinstance(z, Value)
        (xbc,) = b.emit(CONV, s.conv, xbc, *conv, *ragged, conv_state)
        (y,) = b.emit(SCAN2, s.scan, xbc, dt, dt_bias, a, d, *ragged, state)
        whole = self._tensors.uncut(gain)
        start, _ = self._tensors.columns(gain)
        y = all_gather(b, gated(b, GatedSpec("silu", s.d_inner), z, y), start, whole.k)
        return norm(b, NormSpec("rms", whole.k, s.eps), y, whole)


def _rows(ref: WeightRef, rows: Range) -> WeightRef:
    start, stop = rows
    return ref.split(start, stop - start, ref.rows - stop)[1]
