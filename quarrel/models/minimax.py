"""minimax-m2 (MiniMax M2): rope on part of each head, query and key normalised over all heads at once, experts behind a
sigmoid router in every layer."""

from __future__ import annotations

from dataclasses import replace

from quarrel.models.decoder import attentions, decoder, feed_forwards
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    mixers = [replace(a, whole_norm=True) for a in attentions(keys, c, rope)]
    return decoder(keys, c, mixers, feed_forwards(keys, c, "sigmoid"))
