"""llama: Llama 1 to 3, Mistral, TinyLlama, SmolLM2, Mixtral; ernie4_5, ernie4_5-moe. RMS norm, rope on interleaved pairs,
SiLU-gated feed-forward, or experts of that kind."""

from __future__ import annotations

from quarrel.models.decoder import attentions, decoder, feed_forwards
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    """Llama files may carry `attention.sliding_window` (Mistral v0.1); like llama.cpp, it is not applied."""
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "norm", c.head_dim, n_ctx)
    return decoder(keys, c, attentions(keys, c, rope), feed_forwards(keys, c))
