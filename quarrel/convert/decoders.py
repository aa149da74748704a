"""Decoders: which tensors of a Hugging Face folder become which of a GGUF file, and which further keys there are.

The order of values is llama.cpp's: rotations that pair neighbours (`NORM`) have the rows of queries and keys interleaved,
norms that add one to their weights have it added, decays are stored as -exp(A_log), experts are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from quarrel.convert.config import Config
from quarrel.convert.keys import SIGMOID, experts_keys, llama3_factors, nextn_keys, window_keys
from quarrel.convert.layout import View, every, nth, same, span, transposed
from quarrel.convert.rules import (
    ADDS_ONE,
    FUSED_EXPERTS,
    PLUS_ONE,
    ROTATED,
    TRANSPOSED_EXPERTS,
    Architecture,
    Out,
    Rule,
    all_blocks,
    gate_up,
    rule,
)


def _llama(c: Config) -> dict[str, Any]:
    return {"rope.dimension_count": c.head_dim}


def _granite(c: Config) -> dict[str, Any]:
    head = c.integer("hidden_size") // c.heads
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    keys: dict[str, Any] = {key: c.real(name) for key, name in names.items() if c.get(name)}
    if c.get("shared_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = c.integer("shared_intermediate_size")
    lengths = dict.fromkeys(("rope.dimension_count", "attention.key_length", "attention.value_length"), head)
    return {**keys, **lengths}


def _granite_swa(c: Config) -> dict[str, Any]:
    keys = {**_granite(c), "attention.sliding_window": c.integer("sliding_window", default=128)}
    every_fourth = [i % 4 != 0 for i in range(c.layers)]
    keys["attention.sliding_window_pattern"] = c.sliding if c.get("layer_types") else every_fourth
    if (rotated := c.get("no_rope_layers")) is not None:
        keys["attention.rope_pattern"] = [bool(x) for x in rotated]
    return keys


GRANITE = (
    gate_up(r"block_sparse_moe\.input_linear\.weight", "mlp.experts"),
    rule(r"block_sparse_moe\.output_linear\.weight", Out("@ffn_down_exps.weight")),
    *ROTATED,
)


def granite_shared(c: Config) -> tuple[Rule, ...]:
    """The feed-forward that all tokens take: beside experts, or alone."""
    end = "_shexp" if c.get("num_local_experts") else ""
    names = (f"@ffn_gate{end}.weight", f"@ffn_up{end}.weight")
    return (
        rule(r"shared_mlp\.input_linear\.weight", *(Out(n, (nth(i, 2),)) for i, n in enumerate(names))),
        rule(r"shared_mlp\.output_linear\.weight", Out(f"@ffn_down{end}.weight")),
    )


def _qwen_moe(c: Config) -> dict[str, Any]:
    return {k: v for k, v in experts_keys(c).items() if "feed_forward" in k}


def _deepstack(c: Config) -> dict[str, Any]:
    vision = c.get("vision_config", default={})
    return {"n_deepstack_layers": len(vision.get("deepstack_visual_indexes", []))} if isinstance(vision, dict) else {}


def _phi3(c: Config) -> dict[str, Any]:
    most = c.integer("max_position_embeddings")
    original = c.full_rope.get("original_max_position_embeddings", most)
    keys: dict[str, Any] = {
        "rope.dimension_count": c.rotated(),
        "rope.scaling.original_context_length": int(c.number(original, "original_max_position_embeddings")),
        "attention.sliding_window": c.integer("sliding_window", default=0),
        # Of one kind of file with and without factors, which are tensors.
        "rope.scaling.type": None,
        "rope.scaling.factor": None,
    }
    if c.rope.get("long_factor"):
        scale, yarn = most / keys["rope.scaling.original_context_length"], c.rope.get("rope_type") == "yarn"
        grown = 0.1 * math.log(scale) + 1 if yarn else math.sqrt(1 + math.log(scale) / math.log(max(original, 2)))
        keys["rope.scaling.attn_factor"] = grown if scale > 1 else 1.0
    return keys


def _phi3_factors(c: Config) -> dict[str, np.ndarray]:
    factors = {}
    for name in ("long", "short") if c.rope.get("long_factor") else ():
        values = c.rope.get(f"{name}_factor")
        if not isinstance(values, list) or len(values) != c.rotated() // 2:
            raise c.refusal(f"{name}_factor", values, f"{c.rotated() // 2} numbers")
        factors[f"rope_factors_{name}.weight"] = np.array([c.number(x, f"{name}_factor") for x in values])
    return factors


GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "rms_norm_eps": 1e-6}


def _gemma2(c: Config) -> dict[str, Any]:
    keys = {f"{name}_logit_softcapping": c.real(f"{name}_logit_softcapping") for name in ("attn", "final")}
    return {**keys, **window_keys(c, pattern=False)}


def _gemma3(c: Config) -> dict[str, Any]:
    keys = {} if c.get("sliding_window_pattern") == 1 else window_keys(c, pattern=False)
    if c.get("final_logit_softcapping"):
        keys["final_logit_softcapping"] = c.real("final_logit_softcapping")
    return keys


def _gemma3n(c: Config) -> dict[str, Any]:
    n = c.layers
    sparse = c.reals("activation_sparsity_pattern", n)
    if not all(0 <= share < 1 for share in sparse):
        raise c.refusal("activation_sparsity_pattern", sparse, "shares below 1")
    return {
        **_gemma3(c),
        "altup.active_idx": c.integer("altup_active_idx", default=0),
        "altup.num_inputs": c.integer("altup_num_inputs"),
        "embedding_length_per_layer_input": c.integer("hidden_size_per_layer_input"),
        "attention.shared_kv_layers": c.integer("num_kv_shared_layers"),
        "activation_sparsity_scale": [NormalDist().inv_cdf(share) if share else -math.inf for share in sparse],
        "attention.sliding_window_pattern": c.sliding,
    }


def _missing(a: np.ndarray, c: Config) -> np.ndarray:
    """Rows for tokens that stand for images and sound, which have no embedding here."""
    return np.broadcast_to(np.zeros((), a.dtype), (max(0, c.integer("vocab_size") - len(a)), a.shape[-1]))


def _of_full(c: Config, name: str, older: str) -> int | None:
    """What layers that see everything have of their own, in either spelling."""
    if c.get(older) is not None:
        return c.integer(older)
    layers, kinds = c.get("per_layer_config", default={}), c.get("layer_types", default=[])
    full = (layers[i] for i in sorted(layers, key=int) if int(i) < len(kinds) and kinds[int(i)] == "full_attention")
    return next((int(c.number(layer[name], name)) for layer in full if name in layer), None)


def _full_head(c: Config) -> int:
    return _of_full(c, "head_dim", "global_head_dim") or c.head_dim


def _gemma4(c: Config) -> dict[str, Any]:
    full, shared, sliding = _full_head(c), c.integer("num_kv_shared_layers", default=0), c.sliding
    swa = c.rope.get("sliding_attention", {}).get("partial_rotary_factor", 1.0)
    keys: dict[str, Any] = {
        **_gemma3(c),
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": c.integer("hidden_size_per_layer_input", default=0),
        "attention.sliding_window_pattern": sliding,
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), full),
        **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa"), c.head_dim),
        "rope.dimension_count_swa": int(c.head_dim * c.number(swa, "partial_rotary_factor")),
    }
    if (size := c.get("expert_intermediate_size", "moe_intermediate_size")) is not None:
        keys["expert_feed_forward_length"] = size
    if c.get("use_double_wide_mlp"):
        n = c.integer("intermediate_size")
        keys["feed_forward_length"] = [n * (1 + (i >= c.layers - shared)) for i in range(c.layers)]
    if (heads := _of_full(c, "num_key_value_heads", "num_global_key_value_heads")) is not None:
        keys["attention.head_count_kv"] = [c.kv_heads if s else heads for s in sliding]
    return keys


def _gemma4_factors(c: Config) -> dict[str, np.ndarray]:
    """Of layers that see everything: angles divided by 1e30 are none."""
    factor = c.number(c.full_rope.get("partial_rotary_factor", 0.25), "partial_rotary_factor")
    half = _full_head(c) // 2
    return {"rope_freqs.weight": np.where(np.arange(half) < int(half * factor), 1.0, 1e30)}


def _deepseek(c: Config) -> dict[str, Any]:
    rank, rope = c.integer("kv_lora_rank", default=512), c.integer("qk_rope_head_dim")
    keys: dict[str, Any] = {
        "leading_dense_block_count": 0 if c.get("n_routed_experts") else c.layers,
        "expert_shared_count": 0,
        "expert_feed_forward_length": c.integer("intermediate_size"),
        **experts_keys(c),
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": c.integer("qk_nope_head_dim") + rope,
        "attention.value_length_mla": c.integer("v_head_dim"),
        "rope.dimension_count": rope,
    }
    if c.get("q_lora_rank") is not None:
        keys["attention.q_lora_rank"] = c.integer("q_lora_rank")
    if c.get("norm_topk_prob"):
        keys["expert_weights_norm"] = True
    if (mscale := c.full_rope.get("mscale_all_dim")) is not None:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * c.number(mscale, "mscale_all_dim")
    return {**keys, **nextn_keys(c)}


def _of_heads(a: np.ndarray, c: Config, values: bool) -> np.ndarray:
    """The keys' or the values' rows of kv_b_proj: [heads, rows, rank]."""
    keys, size = c.integer("qk_nope_head_dim"), c.integer("v_head_dim")
    heads = a.reshape(-1, keys + size, a.shape[-1])
    return heads[:, keys:] if values else heads[:, :keys]


DEEPSEEK = (
    rule(
        r"kv_b_proj\.weight",
        Out("k_b_proj.weight", (lambda a, c: _of_heads(a, c, False).swapaxes(1, 2),)),
        Out("v_b_proj.weight", (lambda a, c: _of_heads(a, c, True),)),
    ),
    *FUSED_EXPERTS,
    *(
        rule(rf"(?<=\d\.){name}\.weight", Out(f"@nextn.{name}.weight"))
        for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")
    ),
    *(rule(rf"shared_head\.{name}\.weight", Out(f"@nextn.shared_head_{name}.weight")) for name in ("norm", "head")),
)


def _glm4_moe(c: Config) -> dict[str, Any]:
    keys = {"expert_gating_func": SIGMOID, **experts_keys(c), "rope.dimension_count": c.rotated(0.5)}
    if c.get("norm_topk_prob") is not None:
        keys["expert_weights_norm"] = bool(c.get("norm_topk_prob"))
    return {**keys, **nextn_keys(c)}


def _ministral(c: Config) -> dict[str, Any]:
    keys = _llama(c)
    if c.get("model_type") == "ministral3":
        keys["rope.scaling.yarn_log_multiplier"] = c.number(c.rope.get("mscale_all_dim"), "mscale_all_dim")
        keys["attention.temperature_scale"] = c.number(c.rope.get("llama_4_scaling_beta"), "llama_4_scaling_beta")
    return keys


def _llama4(c: Config) -> dict[str, Any]:
    keys = {
        **_llama(c),
        "feed_forward_length": c.integer("intermediate_size_mlp"),
        "expert_feed_forward_length": c.integer("intermediate_size"),
        "interleave_moe_layer_step": c.integer("interleave_moe_layer_step", default=1),
    }
    kinds = c.get("layer_types")
    return {**keys, **({"attention.sliding_window": 0} if kinds and set(kinds) == {"full_attention"} else {})}


def _cohere2(c: Config) -> dict[str, Any]:
    rotated = int(c.real("rotary_pct", default=1.0) * (c.integer("hidden_size") // c.heads))
    scaling = {"rope.scaling.type": "none", "rope.dimension_count": rotated}
    return {"logit_scale": c.real("logit_scale"), **scaling, **window_keys(c, pattern=False)}


def _ernie_moe(c: Config) -> dict[str, Any]:
    shared = c.integer("moe_num_shared_experts", default=0)
    return {
        "expert_count": c.integer("moe_num_experts"),
        "expert_used_count": c.integer("moe_k"),
        "interleave_moe_layer_step": c.integer("moe_layer_interval", default=1),
        "leading_dense_block_count": c.integer("moe_layer_start_index", default=0),
        "expert_feed_forward_length": c.integer("moe_intermediate_size"),
        "expert_shared_count": shared,
        **({"expert_shared_feed_forward_length": c.integer("moe_intermediate_size") * shared} if shared else {}),
    }


def _run(heads_before: Callable[[Config], int], heads: Callable[[Config], int | None]) -> View:
    """Heads of a tensor that holds queries, keys and values."""

    def stop(c: Config) -> int | None:
        n = heads(c)
        return None if n is None else (heads_before(c) + n) * c.head_dim

    return span(lambda c: heads_before(c) * c.head_dim, stop)


ERNIE = (
    rule(
        r"self_attn\.qkv_proj\.weight",
        Out("self_attn.q_proj.weight", (_run(lambda c: 0, lambda c: c.heads),)),
        Out("self_attn.k_proj.weight", (_run(lambda c: c.heads, lambda c: c.kv_heads),)),
        Out("self_attn.v_proj.weight", (_run(lambda c: c.heads + c.kv_heads, lambda c: None),)),
    ),
    gate_up(r"mlp\.up_gate_proj\.weight", "mlp"),
    *FUSED_EXPERTS,
)


def _hunyuan(c: Config) -> dict[str, Any]:
    if c.rope.get("rope_type") not in ("dynamic", "xdrope") or not c.rope.get("alpha"):
        return {}
    alpha, base = (c.number(c.rope.get(n, d), n) for n, d in (("alpha", 50), ("rope_theta", 1e4)))
    keys = {"rope.freq_base": base * alpha ** (c.head_dim / (c.head_dim - 2)), "rope.scaling.type": "none"}
    keys["rope.scaling.factor"] = 1.0
    if c.rope["rope_type"] == "dynamic":
        keys |= dict.fromkeys(("rope.scaling.original_context_length", "context_length"), 256 << 10)
    return keys


def _nemotron(c: Config) -> dict[str, Any]:
    factor = c.get("factor", default=c.rope.get("factor"))
    scaling = (
        {"rope.scaling.type": "none"} if factor is None else {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    )
    eps = c.real("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    rotated = {"rope.dimension_count": c.rotated(0.5), "attention.layer_norm_epsilon": eps}
    return {**scaling, **rotated}


def _muse(c: Config) -> dict[str, Any]:
    scale = {"final_logit_softcapping": c.real("final_logit_softcapping"), "logit_scale": c.real("output_multiplier")}
    return {**scale, **window_keys(c)}


def _muse_norms(c: Config) -> dict[str, np.ndarray]:
    """Queries and keys are normed without weights, and the former scaled."""
    q, k = (np.full(c.head_dim, x) for x in (c.real("qk_scale_factor"), 1.0))
    return {f"blk.{i}.attn_{n}_norm.weight": v for i in range(c.layers) for n, v in (("q", q), ("k", k))}


def _olmo2(c: Config) -> dict[str, Any]:
    keys = window_keys(c)
    if keys and c.get("layer_types") is None:
        keys["attention.sliding_window_pattern"] = [(i + 1) % 4 != 0 for i in range(c.layers)]
    if keys and "rope_theta" in c.full_rope:
        keys["rope.freq_base_swa"] = c.number(c.full_rope["rope_theta"], "rope_theta")
    return keys


def _exaone4(c: Config) -> dict[str, Any]:
    keys, period = window_keys(c), c.get("sliding_window_pattern")
    if keys and c.get("layer_types") is None and period:
        full = [
            (i + 1) % period == 0 if isinstance(period, int) else period[i % len(period)] != "L" for i in range(c.layers)
        ]
        keys["attention.sliding_window_pattern"] = [not f for f in full]
    return keys


GPT_OSS = (
    rule(
        r"experts\.gate_up_proj_blocks",
        Out("@ffn_gate_exps.weight|mxfp4", (every(0, 2, axis=1),)),
        Out("@ffn_up_exps.weight|mxfp4", (every(1, 2, axis=1),)),
    ),
    rule(r"experts\.down_proj_blocks", Out("@ffn_down_exps.weight|mxfp4")),
    rule(
        r"experts\.gate_up_proj",
        Out("@ffn_gate_exps.weight", (every(0, 2, transposed),)),
        Out("@ffn_up_exps.weight", (every(1, 2, transposed),)),
    ),
    rule(
        r"experts\.gate_up_proj_bias",
        Out("@ffn_gate_exps.bias", (every(0, 2, axis=-1),)),
        Out("@ffn_up_exps.bias", (every(1, 2, axis=-1),)),
    ),
    rule(r"experts\.down_proj", Out("@ffn_down_exps.weight", (transposed,))),
    rule(r"experts\.down_proj_bias", Out("@ffn_down_exps.bias")),
    rule(r"self_attn\.sinks", Out("@attn_sinks.weight")),
)

DECODERS: Mapping[str, Architecture] = {
    "LlamaForCausalLM MistralForCausalLM MixtralForCausalLM LLaMAForCausalLM LlamaModel": Architecture(
        "llama", (*ROTATED, *FUSED_EXPERTS), _llama, extra=llama3_factors, defaults={"rms_norm_eps": 1e-6}
    ),
    "Mistral3ForConditionalGeneration Ministral3ForCausalLM": Architecture("mistral3", ROTATED, _ministral),
    "Llama4ForConditionalGeneration Llama4ForCausalLM": Architecture(
        "llama4", TRANSPOSED_EXPERTS, _llama4, extra=llama3_factors
    ),
    "SmolLM3ForCausalLM": Architecture("smollm3", ROTATED, _llama, extra=llama3_factors),
    "Qwen2ForCausalLM Qwen2Model": Architecture("qwen2"),
    "Qwen2_5_VLForConditionalGeneration": Architecture("qwen2vl"),
    "Qwen3ForCausalLM Qwen3Model Qwen3ForSequenceClassification": Architecture("qwen3"),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", FUSED_EXPERTS, _qwen_moe),
    "Qwen3VLForConditionalGeneration": Architecture("qwen3vl", keys=_deepstack),
    "Qwen3VLMoeForConditionalGeneration": Architecture(
        "qwen3vlmoe", TRANSPOSED_EXPERTS, lambda c: {**_qwen_moe(c), **_deepstack(c)}
    ),
    "MellumForCausalLM": Architecture(
        "mellum", FUSED_EXPERTS, lambda c: {**_qwen_moe(c), **window_keys(c)}, names="qwen3moe"
    ),
    "Phi3ForCausalLM": Architecture("phi3", keys=_phi3, extra=_phi3_factors),
    "Gemma2ForCausalLM": Architecture("gemma2", (ADDS_ONE,), _gemma2, defaults=GEMMA),
    "Gemma3ForCausalLM Gemma3ForConditionalGeneration": Architecture(
        "gemma3",
        (ADDS_ONE,),
        _gemma3,
        defaults={
            **GEMMA,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "max_position_embeddings": 131072,
            "vocab_size": 262208,
        },
    ),
    "Gemma3nForCausalLM Gemma3nForConditionalGeneration": Architecture(
        "gemma3n",
        (
            rule(r"(correct_output_scale)", Out(r"\2.weight")),
            rule(r"(embed_tokens(?:_per_layer)?\.weight)", Out(r"\2", (same, _missing))),
        ),
        _gemma3n,
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    ),
    "Gemma4ForCausalLM Gemma4ForConditionalGeneration": Architecture(
        "gemma4",
        (
            rule(r"router\.scale", Out("@ffn_gate_inp.scale")),
            rule(r"router\.per_expert_scale", Out("@ffn_down_exps.scale")),
            rule(r"(layer_scalar|experts\.\w+_proj)", Out(r"\2.weight")),
        ),
        _gemma4,
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
        extra=_gemma4_factors,
    ),
    "GraniteForCausalLM": Architecture("granite", ROTATED, _granite, extra=llama3_factors),
    "GraniteMoeForCausalLM": Architecture("granitemoe", GRANITE, _granite),
    "GraniteSWAForCausalLM": Architecture(
        "granite_swa",
        (rule(r"self_attn\.sinks", Out("@attn_sinks.weight")), *ROTATED),
        _granite_swa,
        names="granite",
    ),
    "NemotronForCausalLM": Architecture("nemotron", (ADDS_ONE,), _nemotron),
    "GptOssForCausalLM": Architecture(
        "gpt-oss",
        GPT_OSS,
        lambda c: {**window_keys(c, pattern=False), "expert_feed_forward_length": c.integer("intermediate_size")},
        drop=r".*experts\.\w+_scales",
    ),
    "SeedOssForCausalLM": Architecture("seed_oss"),
    "Olmo2ForCausalLM Olmo3ForCausalLM": Architecture("olmo2", keys=_olmo2),
    "Exaone4ForCausalLM": Architecture("exaone4", keys=_exaone4, extra=llama3_factors),
    "Cohere2ForCausalLM": Architecture("cohere2", keys=_cohere2, defaults={"tie_word_embeddings": True}),
    "Ernie4_5_ForCausalLM Ernie4_5ForCausalLM": Architecture(
        "ernie4_5", ERNIE, rename=lambda c: ((r"^ernie\.", "model."),)
    ),
    "Ernie4_5_MoeForCausalLM": Architecture("ernie4_5-moe", ERNIE, _ernie_moe, drop=r"model\.mtp_\w+\..*"),
    "HunYuanDenseV1ForCausalLM HunYuanForCausalLM": Architecture("hunyuan-dense", keys=_hunyuan),
    "Glm4ForCausalLM": Architecture("glm4", keys=lambda c: {"rope.dimension_count": c.rotated(0.5)}),
    "Glm4MoeForCausalLM": Architecture("glm4moe", FUSED_EXPERTS, _glm4_moe, blocks=all_blocks),
    "DeepseekV2ForCausalLM DeepseekV3ForCausalLM KimiK2ForCausalLM Glm4MoeLiteForCausalLM": Architecture(
        "deepseek2", DEEPSEEK, _deepseek, blocks=all_blocks
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        "minimax-m2",
        FUSED_EXPERTS,
        lambda c: {
            "expert_feed_forward_length": c.integer("intermediate_size"),
            "rope.dimension_count": c.integer("rotary_dim", default=c.rotated()),
        },
    ),
    "MuseGlimmerForConditionalGeneration": Architecture(
        "muse-glimmer",
        (
            rule(r"(layernorm\.weight)", Out(r"\2", change=PLUS_ONE)),
            rule(r"self_attn\.gate_proj\.weight", Out("@attn_gate.weight")),
            *ROTATED,
        ),
        _muse,
        names="gemma3",
        extra=_muse_norms,
    ),
}
