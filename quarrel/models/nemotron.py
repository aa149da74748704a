"""nemotron (nemotron-mini, Minitron): layer norms, rope on part of each head, squared-ReLU feed-forward without a gate."""

from __future__ import annotations

from quarrel.models.feedforward import PlainFFN
from quarrel.models.keys import Keys, common
from quarrel.models.mixers import Attention
from quarrel.models.rope import rope_from
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors, norm="layer_norm_epsilon")
    rope = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    layers = tuple(
        Layer(Attention(heads, kv, c.head_dim, c.head_dim**-0.5, rope), PlainFFN("relu2", width))
        for heads, kv, width in zip(c.n_heads, c.n_kv, c.ffn)
    )
    return ModelSpec(keys.architecture, c.n_vocab, c.n_embd, c.context_length, "layer", c.norm_eps, layers)
