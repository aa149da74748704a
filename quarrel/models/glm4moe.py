"""glm4moe (GLM-4.5, 4.6, 4.7): rope on half of each head, biases of query, key and value, experts behind a sigmoid router
after the first few layers; the norm in front of the feed-forward is called post_attention_norm."""

from __future__ import annotations

from quarrel.models.decoder import attentions, decoder, feed_forwards
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    like = Layer(None, None, ffn_norm="post_attention_norm")
    return decoder(keys, c, attentions(keys, c, rope), feed_forwards(keys, c, "sigmoid"), like)
