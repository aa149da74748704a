"""A feed-forward without a gate: down(activation(up x))."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quarrel.models.cut import Cutter
from quarrel.models.kind import Block, Kind
from quarrel.models.spec import FeedForward
from quarrel.ops.activation import PlainActivation, plain
from quarrel.ops.contract import Value
from quarrel.ops.linear import Linear
from quarrel.ops.null import Builder


@dataclass(frozen=True)
class PlainFFN(FeedForward):
    """`width` columns between the maps."""

    activation: PlainActivation
    width: int


def feed(b: Builder, block: Block, ffn: PlainFFN, h: Value) -> tuple[Value, Linear]:
    """`activation(up x)`, `[T, width]`."""
    (up,) = block.maps(b, h, [block.linear("ffn_up", ffn.width, block.n_embd)])
    return plain(b, ffn.activation, up), block.linear("ffn_down", block.n_embd, ffn.width)


def _shard(cut: Cutter, ffn: PlainFFN) -> PlainFFN | None:
    own = cut.portion(ffn.width, 1, "ffn_down.weight")
    if own is None:
        return None
    cut.rows("ffn_up", ffn.width, own)
    cut.columns("ffn_down", ffn.width, own)
    return replace(ffn, width=own[1] - own[0])


KIND = Kind(PlainFFN, feed, _shard, ("ffn_",))
