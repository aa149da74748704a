"""What config.json tells of a model, in GGUF's keys: those that most architectures share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quarrel.convert.config import Config
from quarrel.errors import UnsupportedModel

COMMON: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("context_length", ("max_position_embeddings", "n_ctx", "n_positions", "max_length", "model_max_length")),
    ("embedding_length", ("hidden_size", "n_embd", "d_model")),
    ("feed_forward_length", ("prefix_dense_intermediate_size", "intermediate_size", "n_inner")),
    ("attention.head_count", ("num_attention_heads", "n_head")),
    ("attention.head_count_kv", ("num_key_value_heads", "n_kv_heads")),
    ("attention.layer_norm_rms_epsilon", ("rms_norm_eps", "norm_eps")),
    ("attention.layer_norm_epsilon", ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")),
    ("expert_count", ("num_local_experts", "num_experts", "n_routed_experts")),
    ("expert_used_count", ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")),
    ("expert_group_count", ("n_group",)),
    ("expert_group_used_count", ("topk_group",)),
)
GATING: Mapping[str, int] = {"softmax": 1, "sigmoid": 2}
SOFTMAX, SIGMOID = 1, 2
POOLING: Mapping[str, int] = {"mean": 1, "cls": 2, "lasttoken": 3}


def common_keys(c: Config) -> dict[str, Any]:
    """What every architecture reads, as far as the model has it."""
    keys: dict[str, Any] = {}
    for key, names in COMMON:
        if c.get(*names) is not None:
            keys[key] = _read(c, key, names)
    if c.get("num_attention_heads", "n_head"):
        keys |= dict.fromkeys(("attention.key_length", "attention.value_length"), c.head_dim)
    if c.get("is_causal") is False:
        keys["attention.causal"] = False
    gating = c.get("score_function", "scoring_func", "score_func", "moe_router_activation_func")
    if gating is not None:
        if gating not in GATING:
            raise UnsupportedModel(f"the router's function is {str(gating)[:40]!r}, wanted one of {', '.join(GATING)}")
        keys["expert_gating_func"] = GATING[gating]
    return {**keys, **rope_keys(c)}


def _read(c: Config, key: str, names: tuple[str, ...]) -> Any:
    if key.endswith("epsilon"):
        return c.real(*names)
    value = c.get(*names)
    if key == "feed_forward_length" and isinstance(value, list):
        return [int(n) for n in c.reals(next(n for n in names if c.get(n) is not None), c.layers)]
    return c.integer(*names)


def rope_keys(c: Config) -> dict[str, Any]:
    """The rotation and how it is stretched."""
    keys: dict[str, Any] = {}
    full, sliding = c.full_rope, c.rope.get("sliding_attention")
    kind = str(full.get("rope_type", "default")).lower()
    factor = full.get("factor")
    if kind in ("linear", "yarn") and factor is not None:
        keys["rope.scaling.type"] = kind
        keys["rope.scaling.factor"] = c.number(factor, "factor")
    elif kind in ("su", "longrope"):
        keys["rope.scaling.type"] = "longrope"
    elif kind not in ("default", "dynamic", "llama3", "linear", "yarn", "proportional", "xdrope", "mrope"):
        raise UnsupportedModel(f"the rotation is stretched by {kind!r}, wanted linear, yarn, longrope or llama3")
    if kind == "yarn" and factor is not None:
        original = full.get("original_max_position_embeddings", c.get("max_position_embeddings"))
        keys["rope.scaling.original_context_length"] = int(c.number(original, "original_max_position_embeddings"))
        attention = full.get("attention_factor", full.get("attn_factor"))
        named = {
            "yarn_attn_factor": attention,
            "yarn_beta_fast": full.get("beta_fast"),
            "yarn_beta_slow": full.get("beta_slow"),
        }
        keys |= {f"rope.scaling.{n}": c.number(v, n) for n, v in named.items() if v is not None}
    if (sections := c.rope.get("mrope_section")) is not None:
        keys["rope.dimension_sections"] = [int(c.number(n, "mrope_section")) for n in [*sections, 0, 0, 0, 0][:4]]
    if (theta := full.get("rope_theta")) is not None:
        keys["rope.freq_base"] = c.number(theta, "rope_theta")
    if isinstance(sliding, dict) and sliding.get("rope_theta") is not None:
        keys["rope.freq_base_swa"] = c.number(sliding["rope_theta"], "rope_theta")
    return keys


def llama3_factors(c: Config) -> dict[str, np.ndarray]:
    """What divides the angles of Llama 3's long contexts: short waves stay, long ones are stretched by `factor`."""
    rope = c.full_rope
    if str(rope.get("rope_type", "")).lower() != "llama3":
        return {}
    wanted = {"rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    base, factor, low, high = (c.number(rope.get(name, default), name) for name, default in wanted.items())
    original = c.number(rope.get("original_max_position_embeddings", 8192), "original_max_position_embeddings")
    dim = c.head_dim
    waves = 2 * math.pi * np.float64(base) ** (np.arange(0, dim, 2) / dim)
    smooth = (original / waves - low) / max(high - low, 1e-9)
    middle = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(waves < original / high, 1.0, np.where(waves > original / low, factor, middle))
    return {"rope_freqs.weight": factors}


def experts_keys(c: Config) -> dict[str, Any]:
    """Sizes of experts, and how the router weighs them."""
    names = {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace",
    }
    keys: dict[str, Any] = {key: c.integer(name) for key, name in names.items() if c.get(name) is not None}
    if c.get("routed_scaling_factor") is not None:
        keys["expert_weights_scale"] = c.real("routed_scaling_factor")
    return keys


def nextn_keys(c: Config) -> dict[str, Any]:
    """Blocks that predict further tokens."""
    return {"nextn_predict_layers": c.predictors} if c.predictors else {}


def window_keys(c: Config, *, pattern: bool = True) -> dict[str, Any]:
    """Layers that see a window only."""
    if c.get("sliding_window") is None:
        return {}
    keys: dict[str, Any] = {"attention.sliding_window": c.integer("sliding_window")}
    if pattern and c.get("layer_types") is not None:
        keys["attention.sliding_window_pattern"] = c.sliding
    return keys
