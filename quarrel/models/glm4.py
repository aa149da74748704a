"""glm4 (GLM-4-0414): norms around both halves, rope on half of each head, biases of query, key and value."""

from __future__ import annotations

from quarrel.models.decoder import attentions, decoder, feed_forwards
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    """Models that see (GLM-4.1V) have half-split pairs, and sections of frequencies, in all of which text has one place."""
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "neox" if "rope.dimension_sections" in keys else "norm", c.head_dim, n_ctx)
    around = Layer(None, None, post_norms=True)
    return decoder(keys, c, attentions(keys, c, rope), feed_forwards(keys, c), around)
