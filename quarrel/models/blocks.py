"""The block kinds: what an attention, a state-space mixer or a feed-forward is in ops, by the tensors that it reads.

Each takes the residual stream `h` (normalised inside, so that the norm can fuse with the first projection) and returns the
block's values before the projection back to the stream, or, for experts, the value to add.
"""

from __future__ import annotations

from quarrel.errors import UnsupportedModel
from quarrel.models.spec import Attention, Experts, GatedFFN, Mamba1, Mamba2, PlainFFN
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import GatedSpec, gated, plain
from quarrel.ops.attention import AttentionSpec, KVAppendSpec, RopeAppendSpec, attention, kv_append, rope_append
from quarrel.ops.collective import all_gather, all_reduce, place
from quarrel.ops.contract import ConstRef, Value, WeightRef
from quarrel.ops.linear import Linear, add, linear, linear_add, norm_gate_up, norm_linear
from quarrel.ops.mixer import Mamba2MixSpec, mamba2_mix, scan1_gate
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec, RouteSpec, expert_down, expert_up, route
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer
from quarrel.ops.rope import RopeSpec
from quarrel.ops.state import Scan2Spec, conv, scan2


class Block:
    """One layer's view of the file: tensors below `blk.N.`, and the model's norm."""

    def __init__(self, tensors: Tensors, prefix: str, n_embd: int, norm: NormSpec) -> None:
        self.tensors, self.prefix, self.n_embd, self.norm = tensors, prefix, n_embd, norm

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def vector(self, name: str, n: int) -> WeightRef:
        return self.tensors.vector(self.prefix + name, n)

    def sums(self, half: str) -> bool:
        """Whether devices each compute a part of this half of the layer, to be added."""
        share = self.tensors.share
        return share is not None and self.prefix + half in share.sums

    def rows(self, half: str) -> tuple[tuple[int, int], int] | None:
        """Which columns of the stream, of how many, this device's half results in, if not all."""
        share = self.tensors.share
        return None if share is None else share.rows.get(self.prefix + half)

    def gathers(self, half: str) -> tuple[tuple[int, int], int] | None:
        """Which of the mixer's channels, of how many, this device has, if its norm needs those of others."""
        share = self.tensors.share
        return None if share is None else share.gathers.get(self.prefix + half)

    def linear(self, name: str, rows: int, k: int) -> Linear:
        """`name.weight` and, if the file has it, `name.bias`."""
        weight = self.tensors.matrix(f"{self.prefix}{name}.weight", rows, k)
        return weight, self.tensors.optional_vector(f"{self.prefix}{name}.bias", rows)

    def gains(self, name: str) -> tuple[WeightRef, ...]:
        """A norm's weight and, for layer norm, bias."""
        return gains(self.tensors, self.prefix + name, self.norm)


def gains(tensors: Tensors, name: str, norm: NormSpec) -> tuple[WeightRef, ...]:
    """A norm's weight and, for layer norm, bias."""
    weight = tensors.vector(f"{name}.weight", norm.k)
    return (weight,) if norm.kind == "rms" else (weight, tensors.vector(f"{name}.bias", norm.k))


def attend(b: Builder, block: Block, a: Attention, h: Value) -> Value:
    """Query, key and value of `norm(h)`, rotated and cached; the attention's result, `[T, n_heads * head_dim]`."""
    q, k, v = norm_linear(b, block.norm, h, block.gains("attn_norm"), qkv(block, a))
    if block.has("attn_q_norm.weight") or block.has("attn_k_norm.weight"):
        q = norm(b, _per_head(block, a, a.n_heads), q, block.vector("attn_q_norm.weight", a.head_dim))
        k = norm(b, _per_head(block, a, a.n_kv), k, block.vector("attn_k_norm.weight", a.head_dim))
    cache = b.cache(KVLayer(a.n_kv, a.head_dim, a.window))
    if a.rope is None:
        kv_append(b, KVAppendSpec(a.n_kv, a.head_dim), k, v, cache)
    else:
        r = a.rope
        heads = (RopeSpec(r.style, n, a.head_dim, r.n_rot, r.magnitude) for n in (a.n_heads, a.n_kv))
        q = rope_append(b, RopeAppendSpec(*heads), q, k, v, ConstRef("rope_freq", r.freq), cache)
    sinks = block.vector("attn_sinks.weight", a.n_heads) if a.sinks else None
    spec = AttentionSpec(a.n_heads, a.n_kv, a.head_dim, a.scale, a.window, a.cap, a.sinks)
    return attention(b, spec, q, cache, sinks)


def qkv(block: Block, a: Attention) -> tuple[Linear, Linear, Linear]:
    """Separate query, key and value maps, or the rows of a fused one."""
    sizes = (a.n_heads * a.head_dim, a.n_kv * a.head_dim, a.n_kv * a.head_dim)
    if not block.has("attn_qkv.weight"):
        q, k, v = (block.linear(f"attn_{c}", n, block.n_embd) for c, n in zip("qkv", sizes, strict=True))
        return q, k, v
    weight, bias = block.linear("attn_qkv", sum(sizes), block.n_embd)
    # A vector is one row; seen as a column it splits like a weight.
    biases = (None,) * 3 if bias is None else WeightRef(bias.name, bias.type, bias.k, 1).split(*sizes)
    q, k, v = zip(weight.split(*sizes), biases, strict=True)
    return q, k, v


def _per_head(block: Block, a: Attention, heads: int) -> NormSpec:
    return NormSpec("rms", a.head_dim, block.norm.eps, groups=heads)


def mamba2(b: Builder, block: Block, m: Mamba2, h: Value) -> Value:
    """`[T, inner]`, gated and normalised."""
    spec = Scan2Spec(m.n_heads, m.head_dim, m.n_groups, m.n_state)
    into, _ = block.linear("ssm_in", m.inner + spec.width + m.n_heads, block.n_embd)
    parts = [(part, None) for part in into.split(m.inner, spec.width, m.n_heads)]
    z, xbc, dt = norm_linear(b, block.norm, h, block.gains("attn_norm"), parts)
    taps, offset = block.linear("ssm_conv1d", spec.width, m.conv_width)
    offset = offset or block.vector("ssm_conv1d.bias", spec.width)
    a, d = (block.tensors.column(f"{block.prefix}{name}", m.n_heads) for name in ("ssm_a", "ssm_d"))
    mix = Mamba2MixSpec(spec, m.conv_width, block.norm.eps)
    states = (b.state(*mix.conv.state), b.state(*spec.state))
    scan = (block.vector("ssm_dt.bias", m.n_heads), a, d)
    gathered = block.gathers("attn")
    if gathered is not None:
        (start, _), inner = gathered
        y = scan2(b, spec, conv(b, xbc, taps, offset, states[0]), dt, scan, states[1])
        y = all_gather(b, gated(b, GatedSpec("silu", m.inner), z, y), start, inner)
        gain = block.tensors.grouped(f"{block.prefix}ssm_norm.weight", 1, inner)
        return norm(b, NormSpec("rms", inner, block.norm.eps), y, gain)
    gain = block.tensors.grouped(f"{block.prefix}ssm_norm.weight", m.n_groups, m.inner // m.n_groups)
    return mamba2_mix(b, mix, (xbc, dt, z), (taps, offset), scan, gain, states)


def mamba1(b: Builder, block: Block, m: Mamba1, h: Value) -> Value:
    """`[T, inner]`, gated."""
    into, _ = block.linear("ssm_in", 2 * m.inner, block.n_embd)
    x, z = norm_linear(b, block.norm, h, block.gains("attn_norm"), [(half, None) for half in into.split(m.inner, m.inner)])
    taps, offset = block.linear("ssm_conv1d", m.inner, m.conv_width)
    x = conv(b, x, taps, offset or block.vector("ssm_conv1d.bias", m.inner), b.state(m.conv_width - 1, m.inner))
    low, _ = block.linear("ssm_x", m.rank + 2 * m.n_state, m.inner)
    parts = low.split(m.rank, m.n_state, m.n_state)
    if block.sums("attn"):
        dt, over, out = (all_reduce(b, linear(b, x, part, out="f32")) for part in parts)
    else:
        dt, over, out = (linear(b, x, part) for part in parts)
    if m.normed:
        ones = [block.tensors.ones(part.rows) for part in parts]
        dt, over, out = (norm(b, NormSpec("rms", g.k, block.norm.eps), v, g) for g, v in zip(ones, (dt, over, out)))
    dt = linear(b, dt, *block.linear("ssm_dt", m.inner, m.rank))
    a = block.tensors.matrix(f"{block.prefix}ssm_a", m.inner, m.n_state)
    return scan1_gate(b, z, x, dt, (over, out), a, block.vector("ssm_d", m.inner), b.state(m.inner, m.n_state))


def gated_ffn(b: Builder, block: Block, ffn: GatedFFN, h: Value, before: str) -> Value:
    """`activation(gate x) * up x`, `[T, width]`."""
    if block.has("ffn_gate.weight"):
        gate, up = (block.linear(f"ffn_{name}", ffn.width, block.n_embd) for name in ("gate", "up"))
    else:  # one tensor, gate rows first
        both, _ = block.linear("ffn_up", 2 * ffn.width, block.n_embd)
        gate, up = ((half, None) for half in both.split(ffn.width, ffn.width))
    return norm_gate_up(b, block.norm, h, block.gains(before), gate, up, ffn.activation)


def plain_ffn(b: Builder, block: Block, ffn: PlainFFN, h: Value, before: str) -> Value:
    """`activation(up x)`, `[T, width]`."""
    (up,) = norm_linear(b, block.norm, h, block.gains(before), [block.linear("ffn_up", ffn.width, block.n_embd)])
    return plain(b, ffn.activation, up)


def experts(b: Builder, block: Block, e: Experts, h: Value, before: str) -> Value:
    """The weighted sum of the chosen experts and the shared one, `[T, n_embd]`."""
    x = norm(b, block.norm, h, *block.gains(before))
    logits = linear(b, x, *block.linear("ffn_gate_inp", e.n_experts, block.n_embd), out="f32")
    shift = block.vector("exp_probs_b.bias", e.n_experts) if e.gate == "sigmoid" else None
    choice = RouteSpec(e.n_experts, e.used, e.gate, e.renormalise, e.scale, shift is not None, e.n_groups, e.groups_used)
    ids, weights = route(b, choice, logits, shift)
    if block.has("ffn_up.0.weight"):
        raise UnsupportedModel(
            f"{block.prefix}ffn_up.0.weight and its like hold one expert each, as files from before 2024 do; Quarrel wants"
            f" the experts of a layer in one tensor, {block.prefix}ffn_up_exps.weight: convert the model again"
        )
    names = ("gate", "up") if block.has("ffn_gate_exps.weight") else ("up",)
    stacks = [_stack(block, f"ffn_{name}_exps", e.n_experts, e.width, block.n_embd) for name in names]
    biased = block.has("ffn_up_exps.bias")
    biases = [block.tensors.matrix(f"{block.prefix}ffn_{n}_exps.bias", e.n_experts, e.width) for n in names if biased]
    first = ExpertUpSpec(stacks[0].type, e.n_experts, e.used, e.width, block.n_embd, e.activation, len(names) == 2, biased)
    y = expert_up(b, first, x, ids, *stacks, *biases)
    down = _stack(block, "ffn_down_exps", e.n_experts, block.n_embd, e.width)
    name = f"{block.prefix}ffn_down_exps.bias"
    offset = block.tensors.summed_once(name, e.n_experts, block.n_embd) if biased else None
    second = ExpertDownSpec(down.type, e.n_experts, e.used, block.n_embd, e.width, offset is not None)
    out = expert_down(b, second, y, ids, weights, down, offset)
    return out if not e.shared else _shared(b, block, e, x, out)


def _stack(block: Block, name: str, n_experts: int, n: int, k: int) -> WeightRef:
    return block.tensors.stack(f"{block.prefix}{name}.weight", n_experts, n, k)


def _shared(b: Builder, block: Block, e: Experts, x: Value, routed: Value) -> Value:
    up = linear(b, x, *block.linear("ffn_up_shexp", e.shared, block.n_embd))
    if block.has("ffn_gate_shexp.weight"):
        gate = linear(b, x, *block.linear("ffn_gate_shexp", e.shared, block.n_embd))
        up = gated(b, GatedSpec("silu", e.shared), gate, up)
    else:
        up = plain(b, "relu2", up)
    return linear_add(b, routed, up, *block.linear("ffn_down_shexp", block.n_embd, e.shared))


def whole(b: Builder, block: Block, half: str, y: Value, out: Linear | None) -> Value | None:
    """Where devices share this half of the layer: what each has of `out(y)`, of which the sum is the result."""
    if block.sums(half):
        return y if out is None else linear(b, y, *out, out="f32")
    part = block.rows(half)
    if part is None:
        return None
    assert out is not None
    (start, _), total = part
    return place(b, linear(b, y, *out, out="f32"), start, total)


def join(b: Builder, h: Value, y: Value, out: Linear | None, scale: float) -> Value:
    """`h + scale * out(y)`, or `h + scale * y` where the block has projected already."""
    return add(b, h, y, scale) if out is None else linear_add(b, h, y, *out, scale=scale)
