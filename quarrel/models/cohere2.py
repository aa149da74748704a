"""cohere2 (Command R7B, Command A): attention and feed-forward side by side behind one layer norm without bias; three
sliding layers with rope, then a full one without positions."""

from __future__ import annotations

from dataclasses import replace

from quarrel.models.decoder import attentions, decoder, feed_forwards, windows
from quarrel.models.keys import Keys, common
from quarrel.models.mixers import Parallel
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors, norm="layer_norm_epsilon")
    rope = rope_from(keys, tensors, "norm", c.head_dim, n_ctx)
    sizes = windows(keys, c.n_layers, 4)
    mixers = attentions(keys, c, [rope if size else None for size in sizes], sizes)
    both = [Parallel(parts) for parts in zip(mixers, feed_forwards(keys, c))]
    read = decoder(keys, c, both, [None] * c.n_layers, norm="layer")
    return replace(read, logit_scale=keys.float("logit_scale"))
