"""mellum (JetBrains Mellum 2): qwen3moe with windows, and YaRN in the layers that have none."""

from __future__ import annotations

from quarrel.models.decoder import attentions, decoder, feed_forwards, windows
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from, unscaled
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    """Layers with a window rotate by their own base, as in transformers; llama.cpp uses the general one for all."""
    c = common(keys, tensors)
    full = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    sizes = windows(keys, c.n_layers)
    ropes = [unscaled(keys, full) if size else full for size in sizes]
    return decoder(keys, c, attentions(keys, c, ropes, sizes), feed_forwards(keys, c))
