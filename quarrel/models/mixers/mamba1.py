"""Mamba-1: a convolution and a selective scan with a step size per channel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quarrel.models.cut import Cutter
from quarrel.models.kind import Block, Kind
from quarrel.models.spec import Mixer
from quarrel.ops.contract import StateRef, Value
from quarrel.ops.linear import Linear, linear, norm_linear
from quarrel.ops.mixer import scan1_gate
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import StateLayer
from quarrel.ops.state import conv


@dataclass(frozen=True)
class Mamba1(Mixer):
    """`d_inner` channels; `dt_rank` is the width of the step size's bottleneck.

    `normed` (FalconMamba): the bottleneck, B and C are each RMS-normalised, without a gain.
    """

    d_inner: int
    n_state: int
    dt_rank: int
    conv_width: int
    normed: bool = False


def mix(b: Builder, block: Block, m: Mamba1, h: Value, conv_state: StateRef, scan_state: StateRef) -> tuple[Value, Linear]:
    """`[T, d_inner]`, gated."""
    into, _ = block.linear("ssm_in", 2 * m.d_inner, block.n_embd)
    parts = [(part, None) for part in into.split(m.d_inner, m.d_inner)]
    x, z = norm_linear(b, block.norm, h, block.gains(), parts)
    x = conv(b, x, *block.linear("ssm_conv1d", m.d_inner, m.conv_width), conv_state)
    low, _ = block.linear("ssm_x", m.dt_rank + 2 * m.n_state, m.d_inner)
    maps = low.split(m.dt_rank, m.n_state, m.n_state)
    dt, over, out = (linear(b, x, part) for part in maps)
    if m.normed:
        ones = [block.tensors.ones(part.rows) for part in maps]
        dt, over, out = (norm(b, NormSpec("rms", g.k, block.norm.eps), v, g) for g, v in zip(ones, (dt, over, out)))
    dt = linear(b, dt, *block.linear("ssm_dt", m.d_inner, m.dt_rank))
    a, d = block.matrix("ssm_a", m.d_inner, m.n_state), block.vector("ssm_d", m.d_inner)
    y = scan1_gate(b, z, x, dt, (over, out), a, d, scan_state)
    return y, block.linear("ssm_out", block.n_embd, m.d_inner)


def _shard(cut: Cutter, m: Mamba1) -> Mamba1 | None:
    own = cut.portion(m.d_inner, 1, "ssm_out.weight", "ssm_x.weight")
    if own is None:
        return None
    cut.rows("ssm_in", 2 * m.d_inner, own, (m.d_inner + own[0], m.d_inner + own[1]))
    cut.rows("ssm_conv1d", m.d_inner, own)
    cut.columns("ssm_x", m.d_inner, own)
    cut.rows("ssm_dt", m.d_inner, own)
    cut.axis("ssm_a", -2, m.d_inner, own)
    cut.axis("ssm_d", -1, m.d_inner, own)
    cut.columns("ssm_out", m.d_inner, own)
    return replace(m, d_inner=own[1] - own[0])


def _state(m: Mamba1) -> tuple[StateLayer, ...]:
    return StateLayer((m.conv_width - 1, m.d_inner)), StateLayer((m.d_inner, m.n_state))


KIND = Kind(Mamba1, mix, _shard, ("ssm_", "attn_"), _state)
