"""gemma2: norms around both halves, GELU-gated feed-forward, soft caps, a sliding window on every other layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from quarrel.models.decoder import attentions, decoder, windows
from quarrel.models.feedforward import GatedFFN
from quarrel.models.keys import Common, Keys, common
from quarrel.models.mixers import Attention
from quarrel.models.rope import rope_from
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors

LAYERS_27B = 46


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    cap = keys.float("attn_logit_softcapping", 50.0, lo=0.0)
    mixers = attentions(keys, c, rope, windows(keys, c.n_layers, 2, 4096))
    read = gemma(keys, c, [replace(a, cap=cap) for a in mixers], LAYERS_27B)
    return replace(read, logit_cap=keys.float("final_logit_softcapping", 30.0, lo=0.0))


def gemma(keys: Keys, c: Common, mixers: Sequence[Attention], layers_27b: int) -> ModelSpec:
    """What gemma2 and gemma3 share. The 27B models scale by the width per head, which differs from their head size."""
    scale = 1.0 / math.sqrt(c.n_embd / c.n_heads[0] if c.n_layers == layers_27b else c.head_dim)
    ffns = [GatedFFN("gelu_tanh", width) for width in c.ffn]
    read = decoder(keys, c, [replace(a, scale=scale) for a in mixers], ffns, Layer(None, None, post_norms=True))
    return replace(read, embedding_scale=math.sqrt(c.n_embd))
