"""modern-bert (ModernBERT, granite-embedding r2, gte): an encoder with norms before each half, rotation, a window to both
sides in two of three layers, and a gated feed-forward."""

from __future__ import annotations

from collections.abc import Mapping

from quarrel.errors import UnsupportedModel
from quarrel.models.bert import like_decoder
from quarrel.models.feedforward import GatedFFN
from quarrel.models.keys import Keys, common
from quarrel.models.mixers import Attention
from quarrel.models.rope import rope_from, unscaled
from quarrel.models.spec import EncoderSpec, Layer
from quarrel.models.tensors import Tensors
from quarrel.ops.activation import Activation

ACTIVATIONS: Mapping[str, Activation] = {"gelu": "gelu_erf", "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> EncoderSpec:
    c = common(keys, tensors, norm="layer_norm_epsilon")
    full = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    local, window = unscaled(keys, full, 10000.0), keys.int("attention.sliding_window", lo=1)
    if keys.has_list("attention.sliding_window_pattern"):
        slides = keys.bools("attention.sliding_window_pattern", c.n_layers)
    else:
        period = keys.int("attention.sliding_window_pattern", 3, lo=1)
        slides = [il % period != 0 for il in range(c.n_layers)]
    named = keys.str("hidden_activation", "gelu")
    if named not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_activation is {named!r}; this version knows {', '.join(ACTIVATIONS)}")
    scale = c.head_dim**-0.5
    layers: list[Layer] = []
    for heads, kv, width, slide in zip(c.n_heads, c.n_kv, c.ffn, slides):
        rope, size = (local, window) if slide else (full, 0)
        mixer = Attention(heads, kv, c.head_dim, scale, rope, size, both_ways=True)
        # What the norm of the embeddings has done is not done again in front of the first layer.
        layers.append(Layer(mixer, GatedFFN(ACTIVATIONS[named], width), attn_norm="attn_norm" if layers else ""))
    return like_decoder(keys, c, layers, "layer")
