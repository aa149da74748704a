"""A gated delta net: a convolution, a linear attention that corrects its state, and a norm and a gate of every head."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quarrel.models.cut import Cutter, Range
from quarrel.models.kind import Block, Kind
from quarrel.models.spec import Mixer
from quarrel.ops.contract import StateRef, Value
from quarrel.ops.delta import DeltaMixSpec, DeltaSpec, delta_mix
from quarrel.ops.linear import Linear
from quarrel.ops.null import Builder
from quarrel.ops.program import StateLayer


@dataclass(frozen=True)
class GatedDelta(Mixer):
    """`n_k` heads of queries and keys, `n_v` of values; `grouped` if the value heads of one key lie side by side."""

    n_k: int
    n_v: int
    k_dim: int
    v_dim: int
    conv_width: int
    grouped: bool

    @property
    def keys(self) -> int:
        """Channels of the keys, as many as of the queries."""
        return self.n_k * self.k_dim

    @property
    def d_inner(self) -> int:
        return self.n_v * self.v_dim

    @property
    def width(self) -> int:
        return 2 * self.keys + self.d_inner


def mix(b: Builder, block: Block, m: GatedDelta, h: Value, conv_state: StateRef, state: StateRef) -> tuple[Value, Linear]:
    """`[T, d_inner]`, normalised and gated."""
    qkv, alpha, beta, z = block.maps(b, h, (_qkv(block, m), *_rates(block, m), _gate(block, m)))
    conv = [ref for ref in block.linear("ssm_conv1d", m.width, m.conv_width) if ref is not None]
    rule = DeltaSpec(m.n_k, m.n_v, m.k_dim, m.v_dim, block.norm.eps, m.grouped)
    spec = DeltaMixSpec(rule, m.conv_width, block.norm.eps, len(conv) == 2)
    rates = (block.vector("ssm_dt.bias", m.n_v), block.vector("ssm_a", m.n_v))
    gain = block.vector("ssm_norm.weight", m.v_dim)
    y = delta_mix(b, spec, (qkv, alpha, beta, z), tuple(conv), rates, gain, (conv_state, state))
    return y, block.linear("ssm_out", block.n_embd, m.d_inner)


def _qkv(block: Block, m: GatedDelta) -> Linear:
    if not block.has("ssm_in.weight"):
        return block.linear("attn_qkv", m.width, block.n_embd)
    return _of_groups(block, m, "qkv", (0, m.k_dim), (m.k_dim, 2 * m.k_dim), (2 * m.k_dim, _group(m) - _values(m)))


def _gate(block: Block, m: GatedDelta) -> Linear:
    if not block.has("ssm_in.weight"):
        return block.linear("attn_gate", m.d_inner, block.n_embd)
    return _of_groups(block, m, "gate", (_group(m) - _values(m), _group(m)))


def _rates(block: Block, m: GatedDelta) -> tuple[Linear, Linear]:
    """Alpha and beta; `ssm_ba` has the betas and then the alphas of one key after the other."""
    # A file has either; where it has neither, the one that belongs to the model is missed.
    if block.has("ssm_alpha.weight") or not (m.grouped or block.has("ssm_ba.weight")):
        return block.linear("ssm_alpha", m.n_v, block.n_embd), block.linear("ssm_beta", m.n_v, block.n_embd)
    both, each = block.matrix("ssm_ba.weight", 2 * m.n_v, block.n_embd), m.n_v // m.n_k
    beta = [(2 * g * each, (2 * g + 1) * each) for g in range(m.n_k)]
    alpha = [((2 * g + 1) * each, 2 * (g + 1) * each) for g in range(m.n_k)]
    pick = block.tensors.pick
    return (pick(both, "alpha", alpha), None), (pick(both, "beta", beta), None)


def _values(m: GatedDelta) -> int:
    """Channels of the values of one key."""
    return m.d_inner // m.n_k


def _group(m: GatedDelta) -> int:
    """Rows of `ssm_in` for one key: query, key, values, gates."""
    return 2 * m.k_dim + 2 * _values(m)


def _of_groups(block: Block, m: GatedDelta, part: str, *each: Range) -> Linear:
    """These rows of every key's in `ssm_in`, as old files of qwen3next have them."""
    whole, size = block.matrix("ssm_in.weight", m.n_k * _group(m), block.n_embd), _group(m)
    ranges = [(g * size + start, g * size + stop) for start, stop in each for g in range(m.n_k)]
    return block.tensors.pick(whole, part, ranges), None


def _shard(cut: Cutter, m: GatedDelta) -> GatedDelta | None:
    """Keys with their value heads, which lie side by side or one of each key after the other."""
    each = m.n_v // m.n_k
    runs, per = (1, each) if m.grouped else (each, 1)  # so many times, of every key so many value heads side by side
    own = cut.portion(m.n_k * per * m.v_dim, per * m.v_dim, "ssm_out.weight")
    if own is None:
        return None
    first, last = (x // (per * m.v_dim) for x in own)
    heads = [(run * m.n_k + first * per, run * m.n_k + last * per) for run in range(runs)]
    values = [(start * m.v_dim, stop * m.v_dim) for start, stop in heads]
    keys = [(start + first * m.k_dim, start + last * m.k_dim) for start in (0, m.keys)]
    qkv = [*keys, *((2 * m.keys + start, 2 * m.keys + stop) for start, stop in values)]
    cut.rows("attn_qkv", m.width, *qkv)
    cut.rows("ssm_conv1d", m.width, *qkv)
    cut.rows("attn_gate", m.d_inner, *values)
    cut.rows("ssm_in", m.n_k * _group(m), (first * _group(m), last * _group(m)))
    cut.rows("ssm_ba", 2 * m.n_v, (2 * first * each, 2 * last * each))
    for name in ("ssm_alpha", "ssm_beta"):
        cut.rows(name, m.n_v, *heads)
    for name in ("ssm_dt.bias", "ssm_a"):
        cut.axis(name, -1, m.n_v, *heads)
    cut.columns("ssm_out", m.d_inner, *values)
    return replace(m, n_k=last - first, n_v=(last - first) * each)


def _state(m: GatedDelta) -> tuple[StateLayer, ...]:
    return StateLayer((m.conv_width - 1, m.width)), StateLayer((m.n_v, m.v_dim, m.k_dim))


KIND = Kind(GatedDelta, mix, _shard, ("ssm_", "attn_"), _state)
