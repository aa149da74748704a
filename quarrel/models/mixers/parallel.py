"""Halves of a layer side by side: each reads the same norm of the stream, and their sum is added to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quarrel.models.cut import Cutter
from quarrel.models.kind import Block, Kind
from quarrel.models.spec import FeedForward, Mixer
from quarrel.ops.contract import CacheRef, StateRef, Value
from quarrel.ops.linear import add, linear, linear_add
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, StateLayer


@dataclass(frozen=True)
class Parallel(Mixer):
    """Attention and feed-forward (Cohere), or attention and a state space."""

    parts: tuple[Mixer | FeedForward, ...]


def kind(kinds: Mapping[type, Kind]) -> Kind:
    """The entry of `Parallel`, whose parts are of these kinds."""

    def block(b: Builder, block: Block, p: Parallel, h: Value, *state: CacheRef | StateRef) -> tuple[Value, None]:
        """The sum of all parts, `[T, n_embd]`."""
        total: Value | None = None
        for part in p.parts:
            own = kinds[type(part)]
            count = len(own.state(part))
            y, out = own.block(b, block, part, h, *state[:count])
            state = state[count:]
            if total is None:
                total = y if out is None else linear(b, y, *out, out="f32")
            else:
                total = add(b, total, y) if out is None else linear_add(b, total, y, *out)
        assert total is not None
        return total, None

    def shard(cut: Cutter, p: Parallel) -> Parallel | None:
        """What cannot be cut is computed whole by every rank, beside parts that are."""
        parts = [kinds[type(part)].shard(cut, part) for part in p.parts]
        return Parallel(tuple(part or whole for part, whole in zip(parts, p.parts))) if any(parts) else None

    def state(p: Parallel) -> tuple[KVLayer | StateLayer, ...]:
        return tuple(layer for part in p.parts for layer in kinds[type(part)].state(part))

    tensors = tuple(dict.fromkeys(name for kind in kinds.values() for name in kind.tensors))
    return Kind(Parallel, block, shard, tensors, state)
