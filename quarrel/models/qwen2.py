"""qwen2 and qwen2vl (llama with biases of query, key and value), qwen3 and qwen3moe (with norms of each query and key
head), phi3 (Phi-3, Phi-4; fused tensors, optional longrope factors): rope on half-split pairs.

Like llama.cpp, Phi-3's `attention.sliding_window` is not applied.
"""

from __future__ import annotations

from quarrel.models.decoder import attentions, decoder, feed_forwards
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    return decoder(keys, c, attentions(keys, c, rope), feed_forwards(keys, c))
