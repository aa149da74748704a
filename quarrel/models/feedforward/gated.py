"""A gated feed-forward: down(activation(gate x) * up x)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quarrel.models.cut import Cutter
from quarrel.models.kind import Block, Kind
from quarrel.models.spec import FeedForward
from quarrel.ops.activation import Activation, GatedSpec, gated, largest
from quarrel.ops.contract import Value
from quarrel.ops.linear import Linear, linear, norm_gate_up
from quarrel.ops.null import Builder


@dataclass(frozen=True)
class GatedFFN(FeedForward):
    """`width` columns between the maps. `deviations`: of a row's gates those count that are so many standard deviations
    above their mean, and by how far (Gemma 3n); None for all of them."""

    activation: Activation
    width: int
    deviations: float | None = None


def feed(b: Builder, block: Block, ffn: GatedFFN, h: Value) -> tuple[Value, Linear]:
    """`activation(gate x) * up x`, `[T, width]`."""
    if block.has("ffn_gate.weight"):
        gate, up = (block.linear(f"ffn_{name}", ffn.width, block.n_embd) for name in ("gate", "up"))
    else:  # one tensor, gate rows first
        both, _ = block.linear("ffn_up", 2 * ffn.width, block.n_embd)
        gate, up = ((part, None) for part in both.split(ffn.width, ffn.width))
    if ffn.deviations is not None or block.bounded((gate, up)):
        gates, ups = block.maps(b, h, (gate, up))
        gates = gates if ffn.deviations is None else largest(b, gates, ffn.deviations)
        y = gated(b, GatedSpec(ffn.activation, ffn.width), gates, ups)
    elif block.before:
        y = norm_gate_up(b, block.norm, h, block.gains(), gate, up, ffn.activation)
    else:
        y = gated(b, GatedSpec(ffn.activation, ffn.width), linear(b, h, *gate), linear(b, h, *up))
    return y, block.linear("ffn_down", block.n_embd, ffn.width)


def shard(cut: Cutter, ffn: GatedFFN) -> GatedFFN | None:
    """Columns between the maps; a mean over all of them cannot be cut."""
    if ffn.deviations is not None:
        return None
    own = cut.portion(ffn.width, 1, "ffn_down.weight")
    if own is None:
        return None
    if cut.has("ffn_gate.weight"):
        cut.rows("ffn_gate", ffn.width, own)
        cut.rows("ffn_up", ffn.width, own)
    else:
        cut.rows("ffn_up", 2 * ffn.width, own, (ffn.width + own[0], ffn.width + own[1]))
    cut.columns("ffn_down", ffn.width, own)
    return replace(ffn, width=own[1] - own[0])


KIND = Kind(GatedFFN, feed, shard, ("ffn_",))
