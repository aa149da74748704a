"""gemma-embedding (EmbeddingGemma): gemma3 without a causal mask, its windows to both sides; an encoder."""

from __future__ import annotations

import math
from dataclasses import replace

from quarrel.models.bert import like_decoder
from quarrel.models.decoder import attentions, windows
from quarrel.models.feedforward import GatedFFN
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from, unscaled
from quarrel.models.spec import EncoderSpec, Layer
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> EncoderSpec:
    c = common(keys, tensors)
    full = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    local, sizes = unscaled(keys, full, 10000.0), windows(keys, c.n_layers, 6)
    mixers = attentions(keys, c, [local if size else full for size in sizes], sizes)
    layers = [
        Layer(replace(a, both_ways=True), GatedFFN("gelu_tanh", width), post_norms=True) for a, width in zip(mixers, c.ffn)
    ]
    return replace(like_decoder(keys, c, layers, "rms"), embedding_scale=math.sqrt(c.n_embd), embedding_norm=False)
