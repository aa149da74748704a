"""Mamba-2: a convolution, a selective scan over heads, and a gated norm over groups of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quarrel.models.cut import Cutter, even_range
from quarrel.models.kind import Block, Kind
from quarrel.models.spec import Mixer
from quarrel.ops.activation import GatedSpec, gated
from quarrel.ops.contract import StateRef, Value
from quarrel.ops.linear import Linear, norm_linear
from quarrel.ops.mixer import Mamba2MixSpec, mamba2_mix
from quarrel.ops.null import Builder
from quarrel.ops.program import StateLayer
from quarrel.ops.state import Scan2Spec, scan2
from quarrel.ops.state import conv as emit_conv


@dataclass(frozen=True)
class Mamba2(Mixer):
    """`n_groups` groups of heads share B and C, of `n_state` values each."""

    n_heads: int
    head_dim: int
    n_groups: int
    n_state: int
    conv_width: int
    normed: bool = True
    """Whether groups of channels are normalised at the end, or only gated."""

    @property
    def d_inner(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def scan(self) -> Scan2Spec:
        return Scan2Spec(self.n_heads, self.head_dim, self.n_groups, self.n_state)


def mix(b: Builder, block: Block, m: Mamba2, h: Value, conv_state: StateRef, scan_state: StateRef) -> tuple[Value, Linear]:
    """`[T, d_inner]`, gated and normalised."""
    into, _ = block.linear("ssm_in", m.d_inner + m.scan.width + m.n_heads, block.n_embd)
    parts = [(part, None) for part in into.split(m.d_inner, m.scan.width, m.n_heads)]
    z, xbc, dt = norm_linear(b, block.norm, h, block.gains(), parts)
    conv = [ref for ref in block.linear("ssm_conv1d", m.scan.width, m.conv_width) if ref is not None]
    a, d = (block.tensors.column(f"{block.prefix}{name}", m.n_heads) for name in ("ssm_a", "ssm_d"))
    if not m.normed:
        xbc = emit_conv(b, xbc, *block.linear("ssm_conv1d", m.scan.width, m.conv_width), conv_state)
        y = scan2(b, m.scan, xbc, dt, (block.vector("ssm_dt.bias", m.n_heads), a, d), scan_state)
        return gated(b, GatedSpec("silu", m.d_inner), z, y), block.linear("ssm_out", block.n_embd, m.d_inner)
    gain = block.tensors.grouped(f"{block.prefix}ssm_norm.weight", m.n_groups, m.d_inner // m.n_groups)
    scan = (block.vector("ssm_dt.bias", m.n_heads), a, d)
    spec = Mamba2MixSpec(m.scan, m.conv_width, block.norm.eps, len(conv) == 2)
    y = mamba2_mix(b, spec, (xbc, dt, z), tuple(conv), scan, gain, (conv_state, scan_state))
    return y, block.linear("ssm_out", block.n_embd, m.d_inner)


def _shard(cut: Cutter, m: Mamba2) -> Mamba2 | None:
    """Groups with their heads, whose norms then need no other rank. Of one group the heads alone, with B and C on every
    rank; the gain of its norm is cut within the group, so that the values of all ranks are gathered for the norm."""
    per = m.n_heads // m.n_groups
    x = cut.portion(m.d_inner, per * m.head_dim, "ssm_out.weight") if m.n_groups > 1 else None
    if x is not None:
        heads = (x[0] // m.head_dim, x[1] // m.head_dim)
        groups = (heads[0] // per, heads[1] // per)
        cut.axis("ssm_norm.weight", -2, m.n_groups, groups)
    elif m.n_groups == 1 and min(m.n_heads, cut.n_embd) >= cut.ranks and not cut.has("ssm_out.bias"):
        heads, groups = even_range(m.n_heads, cut.rank, cut.ranks), (0, 1)
        x = (heads[0] * m.head_dim, heads[1] * m.head_dim)
        cut.axis("ssm_norm.weight", -1, m.d_inner, x)
    else:
        return None
    states = (groups[0] * m.n_state, groups[1] * m.n_state)
    b = (m.d_inner + states[0], m.d_inner + states[1])
    c = (b[0] + m.n_groups * m.n_state, b[1] + m.n_groups * m.n_state)
    after = m.d_inner + m.scan.width
    xbc = ((m.d_inner + begin, m.d_inner + end) for begin, end in (x, b, c))
    cut.rows("ssm_in", after + m.n_heads, x, *xbc, (after + heads[0], after + heads[1]))
    cut.rows("ssm_conv1d", m.scan.width, x, b, c)
    cut.axis("ssm_dt.bias", -1, m.n_heads, heads)
    for name in ("ssm_a", "ssm_d"):
        cut.axis(name, -len(cut.shape(name)), m.n_heads, heads)
    cut.columns("ssm_out", m.d_inner, x)
    return replace(m, n_heads=heads[1] - heads[0], n_groups=groups[1] - groups[0])


def _state(m: Mamba2) -> tuple[StateLayer, ...]:
    return StateLayer((m.conv_width - 1, m.scan.width)), StateLayer(m.scan.state)


KIND = Kind(Mamba2, mix, _shard, ("ssm_", "attn_"), _state)
