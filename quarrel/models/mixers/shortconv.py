"""A short convolution between two gates (LFM2): out_proj(c * conv(b * u)), with b, c and u of one map."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quarrel.models.cut import Cutter
from quarrel.models.kind import Block, Kind
from quarrel.models.spec import Mixer
from quarrel.ops.activation import GatedSpec, gated
from quarrel.ops.contract import StateRef, Value
from quarrel.ops.linear import Linear
from quarrel.ops.null import Builder
from quarrel.ops.program import StateLayer
from quarrel.ops.state import conv


@dataclass(frozen=True)
class ShortConv(Mixer):
    """`channels` channels, `width` taps, neither bias nor activation."""

    channels: int
    width: int


def mix(b: Builder, block: Block, m: ShortConv, h: Value, state: StateRef) -> tuple[Value, Linear]:
    """`[T, channels]`, gated."""
    into, _ = block.linear("shortconv.in_proj", 3 * m.channels, block.n_embd)
    parts = [(part, None) for part in into.split(m.channels, m.channels, m.channels)]
    before, after, u = block.maps(b, h, parts)
    product = GatedSpec("identity", m.channels)
    taps = block.linear("shortconv.conv", m.channels, m.width)
    y = conv(b, gated(b, product, before, u), *taps, state, "identity")
    return gated(b, product, after, y), block.linear("shortconv.out_proj", block.n_embd, m.channels)


def _shard(cut: Cutter, m: ShortConv) -> ShortConv | None:
    own = cut.portion(m.channels, 1, "shortconv.out_proj.weight")
    if own is None:
        return None
    parts = ((start + own[0], start + own[1]) for start in (0, m.channels, 2 * m.channels))
    cut.rows("shortconv.in_proj", 3 * m.channels, *parts)
    cut.rows("shortconv.conv", m.channels, own)
    cut.columns("shortconv.out_proj", m.channels, own)
    return replace(m, channels=own[1] - own[0])


KIND = Kind(ShortConv, mix, _shard, ("shortconv",), lambda m: (StateLayer((m.width - 1, m.channels)),))
