"""seed_oss (Seed-OSS): qwen2 whose norm in front of the feed-forward is called post_attention_norm."""

from __future__ import annotations

from dataclasses import replace

from quarrel.models import qwen2
from quarrel.models.keys import Keys
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    read = qwen2.spec(keys, tensors, n_ctx)
    return replace(read, layers=tuple(replace(layer, ffn_norm="post_attention_norm") for layer in read.layers))
