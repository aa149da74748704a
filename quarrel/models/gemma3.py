"""gemma3: gemma2 without caps, with query and key norms; five sliding layers with unscaled rope, then a full one."""

from __future__ import annotations

from quarrel.models.decoder import attentions, windows
from quarrel.models.gemma2 import gemma
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from, unscaled
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors

LAYERS_27B = 62


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    full = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    local = unscaled(keys, full, 10000.0)
    sizes = windows(keys, c.n_layers, 6)
    return gemma(keys, c, attentions(keys, c, [local if size else full for size in sizes], sizes), LAYERS_27B)
