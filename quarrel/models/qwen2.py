"""qwen2: llama with query, key and value biases, and rope on half-split pairs."""

from __future__ import annotations

from quarrel.models.keys import Keys, common
from quarrel.models.llama import decoder
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    return decoder(keys, c, rope_from(keys, tensors, "neox", c.head_dim, n_ctx))
