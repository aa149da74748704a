"""exaone4 (EXAONE 4): norms behind both halves and none in front, and of each query and key head. The 32B model has
windows, and no positions in the layers that have none."""

from __future__ import annotations

from quarrel.models.decoder import attentions, decoder, feed_forwards, windows
from quarrel.models.keys import Keys, common
from quarrel.models.olmo2 import BEHIND
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors

LAYERS_32B, WINDOW_32B = 64, 4096


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    sizes = windows(keys, c.n_layers, 4, WINDOW_32B if c.n_layers == LAYERS_32B else 0)
    ropes = [rope if size or not any(sizes) else None for size in sizes]
    return decoder(keys, c, attentions(keys, c, ropes, sizes), feed_forwards(keys, c), BEHIND)
