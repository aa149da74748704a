"""gpt-oss: attention sinks, a sliding window on every other layer, YaRN without rounded bounds, experts with biases."""

from __future__ import annotations

from dataclasses import replace

from quarrel.errors import ModelError
from quarrel.models.decoder import attentions, decoder, windows
from quarrel.models.keys import Keys, common, experts
from quarrel.models.rope import rope_from
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int, *, truncate: bool = False) -> ModelSpec:
    """The model was trained with `truncate` false, which the file cannot say (llama.cpp rounds the bounds: 2e-2 off)."""
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "neox", c.head_dim, n_ctx, truncate=truncate)
    routed = experts(keys, c.ffn[0], "oai", "softmax_topk")
    if routed is None:
        raise ModelError("gpt-oss.expert_count is 0, and a gpt-oss without experts does not exist: convert the model again")
    mixers = [replace(a, sinks=True) for a in attentions(keys, c, rope, windows(keys, c.n_layers, 2, 128))]
    return decoder(keys, c, mixers, [routed] * c.n_layers, Layer(None, None, ffn_norm="post_attention_norm"))
