"""nemotron (nemotron-mini, Minitron): layer norms, rope on part of each head, squared-ReLU feed-forward without a gate."""

from __future__ import annotations

from quarrel.models.decoder import attentions, decoder
from quarrel.models.feedforward import PlainFFN
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors, norm="layer_norm_epsilon")
    rope = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    ffns = [PlainFFN("relu2", width) for width in c.ffn]
    return decoder(keys, c, attentions(keys, c, rope), ffns, norm="layer")
