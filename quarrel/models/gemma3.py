"""gemma3: gemma2 without caps, with query and key norms; five sliding layers with unscaled rope, then a full one."""

from __future__ import annotations

from quarrel.models.gemma2 import attentions, gemma, score_scale, slides
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from, table
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors

LAYERS_27B = 62


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    full = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    local = table(keys.float("rope.freq_base_swa", 10000.0, lo=1.0), full.n_rot, "neox")
    window = keys.int("attention.sliding_window", lo=1)
    sliding = slides(keys, c.n_layers, 6)
    ropes = [local if slide else full for slide in sliding]
    mixers = attentions(c, ropes, [window if slide else 0 for slide in sliding], score_scale(c, LAYERS_27B))
    return gemma(keys, c, mixers)
