"""What a kind of mixer or feed-forward is: one entry of a table, which the assembly walks and the sharding follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quarrel.models.cut import Cutter
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import clamp
from quarrel.ops.contract import Value, WeightRef
from quarrel.ops.linear import Linear, linear, norm_linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, StateLayer


class Block:
    """One half of a layer as it sees the file: tensors below `prefix`, the model's norm, and the name of the norm in front,
    empty where it reads the stream as it is."""

    def __init__(self, tensors: Tensors, prefix: str, n_embd: int, norm: NormSpec, before: str = "") -> None:
        self.tensors, self.prefix, self.n_embd, self.norm, self.before = tensors, prefix, n_embd, norm, before

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def vector(self, name: str, n: int) -> WeightRef:
        return self.tensors.vector(self.prefix + name, n)

    def row(self, name: str, n: int) -> WeightRef:
        """A vector, or a matrix of one row."""
        return self.tensors.grouped(self.prefix + name, 1, n)

    def matrix(self, name: str, rows: int, k: int) -> WeightRef:
        return self.tensors.matrix(self.prefix + name, rows, k)

    def stack(self, name: str, n: int, rows: int, k: int) -> WeightRef:
        """`name.weight`, `[n, rows, k]`, seen as `n * rows` rows."""
        return self.tensors.stack(f"{self.prefix}{name}.weight", n, rows, k)

    def linear(self, name: str, rows: int, k: int) -> Linear:
        """`name.weight` and, if the file has it, `name.bias`."""
        return self.matrix(f"{name}.weight", rows, k), self.tensors.optional(f"{self.prefix}{name}.bias", rows)

    def gains(self, name: str = "") -> tuple[WeightRef, ...]:
        """A norm's weight and, for layer norm, bias; by default those of the norm in front."""
        return gains(self.tensors, self.prefix + (name or self.before), self.norm)

    def normed(self, b: Builder, h: Value) -> Value:
        """What the half reads of the stream."""
        return norm(b, self.norm, h, *self.gains()) if self.before else h

    def bounded(self, maps: Sequence[Linear]) -> bool:
        """Whether any of these maps keeps what goes into it or comes out of it within bounds."""
        return any(self.tensors.bounds(weight) is not None for weight, _ in maps)

    def maps(self, b: Builder, h: Value, maps: Sequence[Linear]) -> tuple[Value, ...]:
        """Each of these maps of that."""
        if self.bounded(maps):
            x = self.normed(b, h)
            return tuple(mapped(b, self.tensors, x, each) for each in maps)
        if self.before:
            return norm_linear(b, self.norm, h, self.gains(), maps)
        return tuple(linear(b, h, *each) for each in maps)


def mapped(b: Builder, tensors: Tensors, x: Value, map: Linear) -> Value:
    """A map of x, both within the bounds that the file has for them."""
    bounds = tensors.bounds(map[0])
    if bounds is None:
        return linear(b, x, *map)
    low, high, least, most = bounds
    return clamp(b, linear(b, clamp(b, x, low, high), *map), least, most)


def gains(tensors: Tensors, name: str, norm: NormSpec) -> tuple[WeightRef, ...]:
    """A norm's weight and, for layer norm, bias: zeros in a file whose norms have none. Falcon-H1's converter leaves
    `.weight` out of one name."""
    bare = name in tensors and f"{name}.weight" not in tensors
    weight = tensors.vector(name if bare else f"{name}.weight", norm.k)
    if norm.kind == "rms":
        return (weight,)
    return weight, tensors.vector(f"{name}.bias", norm.k) if tensors.norm_biases else tensors.zeros(norm.k)


@dataclass(frozen=True)
class Kind:
    """How a half of a layer with a spec of type `spec` is computed, divided and remembered.

    `block(b, block, spec, h, *state)` takes the residual stream `h` (normalised inside, so that the norm can fuse with the
    first projection) and a reference for each entry of `state`. It returns the values before the projection back to the
    stream and that projection, or the value to add and None.

    `shard(cutter, spec)` cuts the tensors of one rank and returns the narrower spec, or None where they cannot be cut. A
    matrix whose columns are cut gives part of a sum; nothing else has to be said of it (`models/collectives.py`).
    """

    spec: type
    block: Callable[..., tuple[Value, Linear | None]]
    shard: Callable[[Cutter, Any], Any]
    tensors: tuple[str, ...]
    """What the names of its tensors begin with."""
    state: Callable[[Any], tuple[KVLayer | StateLayer, ...]] = lambda spec: ()
    """The key/value cache and recurrent states of one such layer."""
