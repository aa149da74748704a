"""smollm3: llama whose every fourth layer has no positions."""

from __future__ import annotations

from quarrel.models.decoder import attentions, decoder, feed_forwards
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "norm", c.head_dim, n_ctx)
    ropes = [None if il % 4 == 3 else rope for il in range(c.n_layers)]
    return decoder(keys, c, attentions(keys, c, ropes), feed_forwards(keys, c))
