"""Multi-head latent attention (DeepSeek-V2, 2024): the cache keeps one compressed vector a token, for all heads.

The absorbed form, for prompts too: a query is mapped into the space of the compressed vectors, and attention's result out
of it, so that keys and values are never expanded. Beside the vector the cache has the one key that is rotated; it comes
first in a head, where rotation looks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quarrel.models.cut import Cutter
from quarrel.models.kind import Block, Kind
from quarrel.models.spec import Mixer, Rope
from quarrel.ops.attention import AttentionSpec, RopeAppendSpec, attention, rope_append
from quarrel.ops.contract import CacheRef, ConstRef, Value
from quarrel.ops.heads import head_linear
from quarrel.ops.linear import Linear, norm_linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer
from quarrel.ops.rope import RopeSpec


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """`rank` values a token are kept beside the rotated key; a head's query has `nope` values without positions, its
    value `value_dim`. `q_rank` is the width of compressed queries, 0 without."""

    n_heads: int
    rank: int
    nope: int
    value_dim: int
    scale: float
    rope: Rope
    q_rank: int = 0

    @property
    def query_dim(self) -> int:
        return self.nope + self.rope.n_rot


def attend(b: Builder, block: Block, a: LatentAttention, h: Value, cache: CacheRef) -> tuple[Value, Linear]:
    """The heads' values of what they attend to, `[T, n_heads * value_dim]`."""
    heads, rot, r = a.n_heads, a.rope.n_rot, a.rope
    both = block.matrix("attn_kv_a_mqa.weight", a.rank + rot, block.n_embd)
    latent, key = both.split(a.rank, rot)
    if a.q_rank:
        first = block.linear("attn_q_a", a.q_rank, block.n_embd)
    else:
        first = block.linear("attn_q", heads * a.query_dim, block.n_embd)
    q, c, k = norm_linear(b, block.norm, h, block.gains(), [first, (latent, None), (key, None)])
    if a.q_rank:
        inner = NormSpec("rms", a.q_rank, block.norm.eps)
        gain = block.vector("attn_q_a_norm.weight", a.q_rank)
        (q,) = norm_linear(b, inner, q, [gain], [block.linear("attn_q_b", heads * a.query_dim, a.q_rank)])
    c = norm(b, NormSpec("rms", a.rank, block.norm.eps), c, block.vector("attn_kv_a_norm.weight", a.rank))
    q = head_linear(b, q, block.stack("attn_k_b", heads, a.rank, a.nope), heads, rot)  # [T, heads * (rot + rank)]
    queries = RopeSpec(r.style, heads, rot + a.rank, rot, r.magnitude)
    rotations = RopeAppendSpec(queries, RopeSpec(r.style, 1, rot, rot, r.magnitude), a.rank)
    q = rope_append(b, rotations, q, k, c, ConstRef("rope_freq", r.freq), cache)
    y = attention(b, AttentionSpec(heads, 1, rot, a.scale, latent=a.rank), q, cache)
    y = head_linear(b, y, block.stack("attn_v_b", heads, a.value_dim, a.rank), heads)
    return y, block.linear("attn_output", block.n_embd, heads * a.value_dim)


def _shard(cut: Cutter, a: LatentAttention) -> LatentAttention | None:
    """Heads; what is compressed, and the cache, is every rank's."""
    own = cut.portion(a.n_heads * a.value_dim, a.value_dim, "attn_output.weight")
    if own is None:
        return None
    heads = (own[0] // a.value_dim, own[1] // a.value_dim)
    queries = (heads[0] * a.query_dim, heads[1] * a.query_dim)
    cut.rows("attn_q_b" if a.q_rank else "attn_q", a.n_heads * a.query_dim, queries)
    for name in ("attn_k_b", "attn_v_b"):
        cut.axis(f"{name}.weight", -3, a.n_heads, heads)
    cut.columns("attn_output", a.n_heads * a.value_dim, own)
    return replace(a, n_heads=heads[1] - heads[0])


KIND = Kind(LatentAttention, attend, _shard, ("attn_",), lambda a: (KVLayer(1, a.rope.n_rot, latent=a.rank),))
