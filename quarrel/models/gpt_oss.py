"""gpt-oss: attention sinks, a sliding window on every other layer, YaRN without rounded bounds, experts with biases."""

from __future__ import annotations

from quarrel.errors import ModelError
from quarrel.models.gemma2 import slides
from quarrel.models.keys import Keys, common, experts
from quarrel.models.mixers import Attention
from quarrel.models.rope import rope_from
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int, *, truncate: bool = False) -> ModelSpec:
    """The model was trained with `truncate` false, which the file cannot say (llama.cpp rounds the bounds: 2e-2 off)."""
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "neox", c.head_dim, n_ctx, truncate=truncate)
    window = keys.int("attention.sliding_window", 128, lo=1)
    routed = experts(keys, c.ffn[0], "oai", "softmax_topk")
    if routed is None:
        raise ModelError("gpt-oss.expert_count is 0, and a gpt-oss without experts does not exist: convert the model again")
    layers = tuple(
        Layer(
            Attention(heads, kv, c.head_dim, c.head_dim**-0.5, rope, window if slide else 0, sinks=True),
            routed,
            ffn_norm="post_attention_norm",
        )
        for heads, kv, slide in zip(c.n_heads, c.n_kv, slides(keys, c.n_layers, 2))
    )
    return ModelSpec(keys.architecture, c.n_vocab, c.n_embd, c.context_length, "rms", c.norm_eps, layers)
