"""The one forward pass: walks a `ModelSpec` and says which ops run on which tensors, in which order."""

from __future__ import annotations

from quarrel.models.spec import Attention, GatedFFN, Layer, ModelSpec
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import cap
from quarrel.ops.attention import AttentionSpec, KVAppendSpec, RopeAppendSpec, attention, kv_append, rope_append
from quarrel.ops.contract import ConstRef, Value, WeightRef
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import add, linear, linear_add, norm_gate_up, norm_linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Program
from quarrel.ops.rope import RopeSpec
from quarrel.ops.sample import sample

Linear = tuple[WeightRef, WeightRef | None]


def assemble(spec: ModelSpec, tensors: Tensors) -> Program:
    """The program of a decoder: token ids in; `hidden`, `logits` and `tokens` of the rows asked for out."""
    b = Builder()
    embeddings = tensors.matrix("token_embd.weight", spec.n_vocab, spec.n_embd)
    with b.at("token_embd"):
        h = embedding(b, b.input("ids"), embeddings, spec.embedding_scale)  # [T, E]
    for il, layer in enumerate(spec.layers):
        h = _layer(b, spec, layer, tensors, f"blk.{il}.", h)
    with b.at("output"):
        h = gather_rows(b, h, b.input("out_rows"))  # [R, E]
        final = NormSpec(spec.norm, spec.n_embd, spec.norm_eps, out="f32")
        hidden = norm(b, final, h, *_gains(tensors, spec, "output_norm"))
        tied = "output.weight" not in tensors
        head = embeddings if tied else tensors.matrix("output.weight", spec.n_vocab, spec.n_embd)
        logits = linear(b, hidden, head, tensors.optional_vector("output.bias", spec.n_vocab), out="f32")  # [R, V]
        if spec.logit_scale != 1.0 or spec.logit_cap:
            logits = cap(b, logits, spec.logit_scale, spec.logit_cap)
        tokens = sample(b, logits)  # [R]
    return b.program(hidden=hidden, logits=logits, tokens=tokens)


def _layer(b: Builder, spec: ModelSpec, layer: Layer, tensors: Tensors, prefix: str, h: Value) -> Value:
    with b.at(f"{prefix}attn"):
        y = _attention(b, spec, layer.mixer, tensors, prefix, h)
        out = _linear(tensors, f"{prefix}attn_output", spec.n_embd, layer.mixer.n_heads * layer.mixer.head_dim)
        h = _join(b, spec, layer, tensors, h, y, out, f"{prefix}post_attention_norm")
    with b.at(f"{prefix}ffn"):
        y = _gate_up(b, spec, layer.ffn, tensors, prefix, h)
        out = _linear(tensors, f"{prefix}ffn_down", spec.n_embd, layer.ffn.width)
        return _join(b, spec, layer, tensors, h, y, out, f"{prefix}post_ffw_norm")


def _join(
    b: Builder, spec: ModelSpec, layer: Layer, tensors: Tensors, h: Value, y: Value, out: Linear, post_norm: str
) -> Value:
    """Projects `y` and adds it to the residual stream."""
    if not layer.post_norms:
        return linear_add(b, h, y, *out, scale=layer.residual_scale)
    y = linear(b, y, *out)
    y = norm(b, NormSpec(spec.norm, spec.n_embd, spec.norm_eps), y, *_gains(tensors, spec, post_norm))
    return add(b, h, y, layer.residual_scale)


def _attention(b: Builder, spec: ModelSpec, a: Attention, tensors: Tensors, prefix: str, h: Value) -> Value:
    pre = NormSpec(spec.norm, spec.n_embd, spec.norm_eps)
    maps = _qkv(tensors, prefix, a, spec.n_embd)
    q, k, v = norm_linear(b, pre, h, _gains(tensors, spec, f"{prefix}attn_norm"), maps)
    if f"{prefix}attn_q_norm.weight" in tensors:
        q = norm(b, _head_norm(spec, a, a.n_heads), q, tensors.vector(f"{prefix}attn_q_norm.weight", a.head_dim))
        k = norm(b, _head_norm(spec, a, a.n_kv), k, tensors.vector(f"{prefix}attn_k_norm.weight", a.head_dim))
    cache = b.cache(KVLayer(a.n_kv, a.head_dim, a.window))
    if a.rope is None:
        kv_append(b, KVAppendSpec(a.n_kv, a.head_dim), k, v, cache)
    else:
        r = a.rope
        heads = (RopeSpec(r.style, n, a.head_dim, r.n_rot, r.magnitude) for n in (a.n_heads, a.n_kv))
        q = rope_append(b, RopeAppendSpec(*heads), q, k, v, ConstRef("rope_freq", r.freq), cache)
    return attention(b, AttentionSpec(a.n_heads, a.n_kv, a.head_dim, a.scale, a.window, a.cap), q, cache)


def _head_norm(spec: ModelSpec, a: Attention, heads: int) -> NormSpec:
    return NormSpec("rms", a.head_dim, spec.norm_eps, groups=heads)


def _qkv(tensors: Tensors, prefix: str, a: Attention, n_embd: int) -> tuple[Linear, Linear, Linear]:
    """Separate query, key and value maps, or the rows of a fused one."""
    sizes = (a.n_heads * a.head_dim, a.n_kv * a.head_dim, a.n_kv * a.head_dim)
    if f"{prefix}attn_qkv.weight" not in tensors:
        q, k, v = (_linear(tensors, f"{prefix}attn_{c}", n, n_embd) for c, n in zip("qkv", sizes, strict=True))
        return q, k, v
    weight, bias = _linear(tensors, f"{prefix}attn_qkv", sum(sizes), n_embd)
    biases = _cut(bias, sizes) if bias else (None, None, None)
    q, k, v = zip(weight.split(*sizes), biases, strict=True)
    return q, k, v


def _cut(bias: WeightRef, sizes: tuple[int, ...]) -> tuple[WeightRef, ...]:
    """A fused bias in pieces; seen as rows of one value so that it can be split like a weight."""
    column = WeightRef(bias.name, bias.type, bias.k, 1)
    return column.split(*sizes)


def _gate_up(b: Builder, spec: ModelSpec, ffn: GatedFFN, tensors: Tensors, prefix: str, h: Value) -> Value:
    pre = NormSpec(spec.norm, spec.n_embd, spec.norm_eps)
    if f"{prefix}ffn_gate.weight" in tensors:
        gate = _linear(tensors, f"{prefix}ffn_gate", ffn.width, spec.n_embd)
        up = _linear(tensors, f"{prefix}ffn_up", ffn.width, spec.n_embd)
    else:  # one tensor, gate rows first
        both, _ = _linear(tensors, f"{prefix}ffn_up", 2 * ffn.width, spec.n_embd)
        gate, up = ((half, None) for half in both.split(ffn.width, ffn.width))
    return norm_gate_up(b, pre, h, _gains(tensors, spec, f"{prefix}ffn_norm"), gate, up, ffn.activation)


def _linear(tensors: Tensors, name: str, rows: int, k: int) -> Linear:
    return tensors.matrix(f"{name}.weight", rows, k), tensors.optional_vector(f"{name}.bias", rows)


def _gains(tensors: Tensors, spec: ModelSpec, name: str) -> tuple[WeightRef, ...]:
    weight = tensors.vector(f"{name}.weight", spec.n_embd)
    return (weight,) if spec.norm == "rms" else (weight, tensors.vector(f"{name}.bias", spec.n_embd))
