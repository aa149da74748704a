"""deepseek2: DeepSeek V2, V3 and R1, Kimi K2, GLM-4.7-Flash. Multi-head latent attention; the first layers dense, the
others with experts in groups and a shared one. Blocks that predict further tokens are read by `assemble_predictor` only."""

from __future__ import annotations

import math
from dataclasses import replace

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.models.feedforward import GatedFFN
from quarrel.models.keys import MAX_WIDTH, Keys, common, experts
from quarrel.models.mixers import LatentAttention
from quarrel.models.rope import rope_from
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors
from quarrel.ops.moe import Gate

_GLM_FLASH = ((47, 48), 154880)
"""Blocks and vocabulary of GLM-4.7-Flash, whose first files do not say that its router is a sigmoid."""


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors, latent=True)
    if "attention.key_length_mla" not in keys:
        raise UnsupportedModel(
            f"the key {keys.architecture}.attention.key_length_mla is missing: files from before April 2025 have keys and"
            " values in one tensor, attn_kv_b; convert the model again, or download a newer file"
        )
    key, value = (keys.int(f"attention.{name}_length_mla", lo=1, hi=MAX_WIDTH) for name in ("key", "value"))
    rot = keys.int("rope.dimension_count", lo=2, hi=key - 1)
    # The magnitude that YaRN gives a rotation is in the scale here.
    rope = replace(rope_from(keys, tensors, "norm", rot, n_ctx), magnitude=1.0)
    size = 1.0
    if keys.str("rope.scaling.type", "") == "yarn":
        factor = keys.float("rope.scaling.factor", 1.0, lo=1.0)
        size += keys.float("rope.scaling.yarn_log_multiplier", 0.0, lo=0.0) * math.log(factor)
    rank = keys.int("attention.kv_lora_rank", lo=1, hi=MAX_WIDTH)
    if c.head_dim != rank + rot or set(c.n_kv) != {1}:
        raise ModelError(
            f"attention.key_length is {c.head_dim} and head_count_kv {c.n_kv[0]}, wanted kv_lora_rank +"
            f" rope.dimension_count = {rank + rot} and 1: the file contradicts itself"
        )
    # llama.cpp tells small models by their number of layers; the tensors say what there is.
    compressed = any(f"blk.0.attn_q_{part}.weight" in tensors for part in "ab")
    mixer = LatentAttention(
        n_heads=c.n_heads[0],
        rank=rank,
        nope=key - rot,
        value_dim=value,
        scale=size * size / math.sqrt(key),
        rope=rope,
        q_rank=keys.int("attention.q_lora_rank", lo=1, hi=MAX_WIDTH) if compressed else 0,
    )
    blocks, vocabulary = _GLM_FLASH
    gate: Gate = "sigmoid" if keys.int("block_count") in blocks and c.n_vocab == vocabulary else "softmax"
    routed = experts(keys, c.ffn[0], "silu", gate, renormalise=False)
    dense = keys.int("leading_dense_block_count", 0) if routed else c.n_layers
    layers = tuple(
        Layer(replace(mixer, n_heads=heads), routed if routed and il >= dense else GatedFFN("silu", width))
        for il, (heads, width) in enumerate(zip(c.n_heads, c.ffn))
    )
    return ModelSpec(keys.architecture, c.n_vocab, c.n_embd, c.context_length, "rms", c.norm_eps, layers)
