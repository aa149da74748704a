"""olmo2 (OLMo 2 and 3): norms behind both halves and none in front, query and key normalised over all heads at once. OLMo 3
has windows, and YaRN in the layers that have none."""

from __future__ import annotations

from dataclasses import replace

from quarrel.models.decoder import attentions, decoder, feed_forwards, windows
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from, unscaled
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors

BEHIND = Layer(None, None, post_norms=True, pre_norms=False)


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    full = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    sizes = windows(keys, c.n_layers, 4, 0)
    ropes = [unscaled(keys, full) if size else full for size in sizes]
    mixers = [replace(a, whole_norm=True) for a in attentions(keys, c, ropes, sizes)]
    return decoder(keys, c, mixers, feed_forwards(keys, c), BEHIND)
