"""muse-glimmer (Meta Muse Glimmer): normalised embeddings, gated attention, positions on sliding layers only, norms around
both halves, logits scaled and then capped."""

from __future__ import annotations

from dataclasses import replace

from quarrel.models.decoder import attentions, decoder, feed_forwards, windows
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors

AROUND = Layer(None, None, post_norms=True, post_norm_eps=1e-8)


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    rope, sizes = rope_from(keys, tensors, "norm", c.head_dim, n_ctx), windows(keys, c.n_layers, 4)
    attention = attentions(keys, c, [rope if size else None for size in sizes], sizes)
    read = decoder(keys, c, [replace(a, gate="own") for a in attention], feed_forwards(keys, c), AROUND)
    scale, cap = keys.float("logit_scale", 1.0), keys.float("final_logit_softcapping", 0.0, lo=0.0)
    return replace(read, logit_scale=scale, logit_cap=cap, embedding_norm=True)
