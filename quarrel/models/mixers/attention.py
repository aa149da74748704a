"""Self-attention over a key/value cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from quarrel.models.cut import Cutter
from quarrel.models.kind import Block, Kind
from quarrel.models.spec import Mixer, Rope, Temperature
from quarrel.ops.activation import GatedSpec, gated
from quarrel.ops.attention import AttentionSpec, KVAppendSpec, RopeAppendSpec, attention, kv_append, rope_append
from quarrel.ops.contract import CacheRef, ConstRef, Value, WeightRef
from quarrel.ops.encode import EncodeSpec, encode
from quarrel.ops.linear import Linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.position import by_position
from quarrel.ops.program import KVLayer
from quarrel.ops.rope import RopeSpec, rope, rotated_by


@dataclass(frozen=True)
class Attention(Mixer):
    """`window` and `cap` are off at 0; `rope` None means no positions.

    Query and key are normalised where the file has gains for that: each head, or with `whole_norm` all of them at once;
    before the rotation, or with `late_norm` after it. `unit_norm`: each head, with gains of one that no file has. With
    `value_norm` each value is, too, by no gains. Without a value map (`keys_are_values`) values are keys before their norm
    and rotation. What `reads` another layer's has neither.

    `gate`: the result is multiplied by the sigmoid of one more map of the layer's input: "own", `attn_gate`; "in query",
    the second half of every head's rows in `attn_q`.

    With `both_ways` a query sees what is behind it too, of a window `window // 2` keys on either side; nothing is kept.
    """

    n_heads: int
    n_kv: int
    head_dim: int
    scale: float
    rope: Rope | None
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    whole_norm: bool = False
    late_norm: bool = False
    unit_norm: bool = False
    temperature: Temperature | None = None
    chunked: bool = False
    """A window is a chunk: a query sees the keys of its own."""
    gate: Literal["", "own", "in query"] = ""
    value_norm: bool = False
    keys_are_values: bool = False
    both_ways: bool = False
    parted: bool = False
    """Of what sees `both_ways`: windows of tokens (`window_start`) that see themselves alone."""
    image_spans: bool = False
    """A token of an image sees the image's later ones, too."""
    reads: int | None = None


def attend(b: Builder, block: Block, a: Attention, h: Value, cache: CacheRef | None = None) -> tuple[Value, Linear]:
    """Query, key and value of `norm(h)`, rotated and cached; the attention's result, `[T, n_heads * head_dim]`."""
    if a.reads is not None:
        assert cache is not None
        return _borrow(b, block, a, h, cache)
    maps = qkv(block, a)[: 2 if a.keys_are_values else 3]
    q, k, *rest = block.maps(b, h, (*maps, *((_gate(block, a),) if a.gate else ())))
    v, gates = (k, rest) if a.keys_are_values else (rest[0], rest[1:])
    if a.value_norm:
        v = norm(b, NormSpec("rms", a.head_dim, block.norm.eps, a.n_kv), v, block.tensors.ones(a.head_dim))
    if not a.late_norm:
        q, k = _normed(b, block, a, q, k)
    out = block.linear("attn_output", block.n_embd, a.n_heads * a.head_dim)
    if cache is None:
        return encoded(b, a, q, k, v), out
    if a.rope is None:
        kv_append(b, KVAppendSpec(a.n_kv, a.head_dim), k, v, cache)
    else:
        r, freq = a.rope, ConstRef("rope_freq", a.rope.freq)
        heads = [RopeSpec(r.style, n, a.head_dim, r.n_rot, r.magnitude, r.axes) for n in (a.n_heads, a.n_kv)]
        if a.late_norm:
            rotated = [rope(b, spec, x, rotated_by(b, spec), freq) for spec, x in zip(heads, (q, k))]
            q, k = _normed(b, block, a, *rotated)
            kv_append(b, KVAppendSpec(a.n_kv, a.head_dim), k, v, cache)
        else:
            q = rope_append(b, RopeAppendSpec(heads[0], heads[1]), q, k, v, freq, cache)
    sinks = block.vector("attn_sinks.weight", a.n_heads) if a.sinks else None
    if a.temperature is not None:
        t = a.temperature
        q = gated(
            b, GatedSpec("identity", a.n_heads * a.head_dim, per_row=True), by_position(b, t.factors, t.size, t.shift), q
        )
    spec = AttentionSpec(
        a.n_heads, a.n_kv, a.head_dim, a.scale, a.window, a.cap, a.sinks, chunked=a.chunked, spans=a.image_spans
    )
    y = attention(b, spec, q, cache, sinks)
    for gate in gates:
        y = gated(b, GatedSpec("sigmoid", a.n_heads * a.head_dim), gate, y)
    return y, out


def encoded(b: Builder, a: Attention, q: Value, k: Value, v: Value) -> Value:
    """Attention to both sides, with the rotation before it."""
    if a.rope is not None:
        r, freq = a.rope, ConstRef("rope_freq", a.rope.freq)
        heads = (RopeSpec(r.style, n, a.head_dim, r.n_rot, r.magnitude, r.axes) for n in (a.n_heads, a.n_kv))
        q, k = (rope(b, spec, x, rotated_by(b, spec), freq) for spec, x in zip(heads, (q, k)))
    spec = EncodeSpec(a.n_heads, a.head_dim, a.scale, a.n_kv, a.window // 2)
    return encode(b, spec, q, k, v, "window_start" if a.parted else "query_start")


def _borrow(b: Builder, block: Block, a: Attention, h: Value, cache: CacheRef) -> tuple[Value, Linear]:
    """`attend` with keys and values of another layer: queries only. Some files have maps for them all the same."""
    width, r = a.n_heads * a.head_dim, a.rope
    block.tensors.unused(*(f"{block.prefix}attn_{name}.weight" for name in ("k", "v", "k_norm")))
    (q,) = block.maps(b, h, [block.linear("attn_q", width, block.n_embd)])
    if block.has("attn_q_norm.weight"):
        each = NormSpec("rms", a.head_dim, block.norm.eps, a.n_heads)
        q = norm(b, each, q, block.vector("attn_q_norm.weight", a.head_dim))
    if r is not None:
        spec = RopeSpec(r.style, a.n_heads, a.head_dim, r.n_rot, r.magnitude, r.axes)
        q = rope(b, spec, q, rotated_by(b, spec), ConstRef("rope_freq", r.freq))
    y = attention(b, AttentionSpec(a.n_heads, a.n_kv, a.head_dim, a.scale, a.window, a.cap), q, cache)
    return y, block.linear("attn_output", block.n_embd, width)


def qkv(block: Block, a: Attention) -> tuple[Linear, Linear, Linear]:
    """Separate query, key and value maps, or the rows of a fused one."""
    sizes = (a.n_heads * a.head_dim, a.n_kv * a.head_dim, a.n_kv * a.head_dim)
    if a.gate == "in query":
        k, v = (block.linear(f"attn_{c}", sizes[1], block.n_embd) for c in "kv")
        return _half_of_heads(block, a, 0), k, v
    if not block.has("attn_qkv.weight"):
        names = ("q", "k", "k" if a.keys_are_values else "v")
        q, k, v = (block.linear(f"attn_{c}", n, block.n_embd) for c, n in zip(names, sizes, strict=True))
        return q, k, v
    weight, bias = block.linear("attn_qkv", sum(sizes), block.n_embd)
    # A vector is one row; seen as a column it splits like a weight.
    biases = (None,) * 3 if bias is None else WeightRef(bias.name, bias.type, bias.k, 1).split(*sizes)
    q, k, v = zip(weight.split(*sizes), biases, strict=True)
    return q, k, v


def _normed(b: Builder, block: Block, a: Attention, q: Value, k: Value) -> tuple[Value, Value]:
    """Query and key behind their norms, if the file has any."""
    if a.unit_norm:
        spec, ones = NormSpec("rms", a.head_dim, block.norm.eps), block.tensors.ones(a.head_dim)
        return norm(b, replace(spec, groups=a.n_heads), q, ones), norm(b, replace(spec, groups=a.n_kv), k, ones)
    if not block.has("attn_q_norm.weight") and not block.has("attn_k_norm.weight"):
        return q, k
    made = []
    for name, x, heads in (("attn_q_norm.weight", q, a.n_heads), ("attn_k_norm.weight", k, a.n_kv)):
        width, groups = (heads * a.head_dim, 1) if a.whole_norm else (a.head_dim, heads)
        made.append(norm(b, NormSpec("rms", width, block.norm.eps, groups), x, block.vector(name, width)))
    return made[0], made[1]


def _gate(block: Block, a: Attention) -> Linear:
    if a.gate == "own":
        return block.linear("attn_gate", a.n_heads * a.head_dim, block.n_embd)
    return _half_of_heads(block, a, 1)


def _half_of_heads(block: Block, a: Attention, half: int) -> Linear:
    """Of every head's rows in `attn_q` the first half, its query, or the second, its gate."""
    both = block.matrix("attn_q.weight", 2 * a.n_heads * a.head_dim, block.n_embd)
    starts = [(2 * head + half) * a.head_dim for head in range(a.n_heads)]
    ranges = [(start, start + a.head_dim) for start in starts]
    return block.tensors.pick(both, ("query", "gate")[half], ranges), None


def _shard(cut: Cutter, a: Attention) -> Attention | None:
    """Heads with their keys and values; ranks share a key/value head where there are more ranks than those. A norm over all
    heads cannot be cut: every rank computes such a layer whole."""
    if a.whole_norm:
        return None
    dim, width, group = a.head_dim, a.n_heads * a.head_dim, a.n_heads // a.n_kv
    q = cut.portion(width, group * dim, "attn_output.weight")
    if q is not None:
        kv = (q[0] // (group * dim), q[1] // (group * dim))
    else:
        per = a.n_heads // cut.ranks
        if a.n_heads % cut.ranks or cut.ranks % a.n_kv or per * dim % cut.elements("attn_output.weight"):
            return None
        q = (cut.rank * per * dim, (cut.rank + 1) * per * dim)
        kv = (q[0] // (group * dim), q[0] // (group * dim) + 1)
    keys, kv_width = (kv[0] * dim, kv[1] * dim), a.n_kv * dim
    if a.gate == "in query":
        cut.rows("attn_q", 2 * width, (2 * q[0], 2 * q[1]))
    else:
        cut.rows("attn_q", width, q)
        cut.rows("attn_gate", width, q)
    cut.rows("attn_k", kv_width, keys)
    cut.rows("attn_v", kv_width, keys)
    after = [(start + begin, start + end) for start in (width, width + kv_width) for begin, end in [keys]]
    cut.rows("attn_qkv", width + 2 * kv_width, q, *after)
    heads = (q[0] // dim, q[1] // dim)
    cut.axis("attn_sinks.weight", -1, a.n_heads, heads)
    cut.columns("attn_output", width, q)
    return replace(a, n_heads=heads[1] - heads[0], n_kv=kv[1] - kv[0])


def _kept(a: Attention) -> tuple[KVLayer, ...]:
    return () if a.both_ways or a.reads is not None else (KVLayer(a.n_kv, a.head_dim, a.window),)


KIND = Kind(Attention, attend, _shard, ("attn_",), _kept)
