"""Models with recurrent layers: which tensors of a Hugging Face folder become which, and their keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quarrel.convert.config import Config
from quarrel.convert.decoders import DECODERS, GRANITE, granite_shared
from quarrel.convert.keys import SIGMOID, experts_keys, nextn_keys
from quarrel.convert.layout import Change, View, column, span, squeezed
from quarrel.convert.rules import ADDS_ONE, FUSED_EXPERTS, ROTATED, Architecture, Out, Rule, all_blocks, rule
from quarrel.errors import UnsupportedModel

ENDLESS = 1 << 20
"""The context of models whose state does not grow."""
DECAY: Callable[[Config], Change | None] = lambda c: lambda x, first: -np.exp(x)  # noqa: E731
CONV = rule(r"(conv1d\.weight|conv\.conv\.weight)", Out(r"\2", (squeezed,)))


def _groups(name: str) -> View:
    return lambda a, c: a.reshape(c.integer(name), -1)


def _mamba2(groups: str) -> tuple[Rule, ...]:
    return (
        CONV,
        rule(r"\.dt_bias", Out(".dt_proj.bias")),
        rule(r"(A_log)", Out(r"\2", (column,), change=DECAY)),
        rule(r"((?:mixer|mamba)\.D)", Out(r"\2", (column,))),
        rule(r"((?:mixer|mamba)\.norm\.weight)", Out(r"\2", (_groups(groups),))),
    )


def _mamba_keys(c: Config) -> dict[str, Any]:
    d = c.integer("hidden_size", "d_model")
    return {
        "context_length": ENDLESS,
        "embedding_length": d,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": c.integer("conv_kernel", "d_conv", default=4),
        "ssm.inner_size": c.integer("intermediate_size", "d_inner", default=2 * d),
        "ssm.state_size": c.integer("state_size", "d_state", default=16),
        "ssm.time_step_rank": c.integer("time_step_rank", "dt_rank", default=-(d // -16)),
        "attention.layer_norm_rms_epsilon": c.real("layer_norm_epsilon", "rms_norm_eps", default=1e-5),
        "attention.layer_norm_epsilon": None,
        "ssm.dt_b_c_rms": c.get("model_type") == "falcon_mamba",
    }


def _mamba2_keys(c: Config) -> dict[str, Any]:
    d = c.integer("hidden_size", "d_model", "dim")
    inner, head = c.integer("expand", default=2) * d, c.integer("head_dim", default=64)
    return {
        "context_length": ENDLESS,
        "embedding_length": d,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        **dict.fromkeys(("attention.key_length", "attention.value_length", "attention.layer_norm_epsilon")),
        "ssm.conv_kernel": c.integer("conv_kernel", "d_conv", default=4),
        "ssm.inner_size": inner,
        "ssm.state_size": c.integer("state_size", "d_state", default=128),
        "ssm.time_step_rank": inner // max(1, head),
        "ssm.group_count": c.integer("n_groups", default=1),
        "attention.layer_norm_rms_epsilon": c.real("layer_norm_epsilon", "rms_norm_eps", default=1e-5),
    }


def _granite_attention(c: Config) -> list[bool]:
    return [kind in ("attention", "full_attention") for kind in c.strs("layer_types", c.layers)]


def _granite_hybrid_keys(c: Config) -> dict[str, Any]:
    keys = dict(DECODERS["GraniteForCausalLM"].keys(c))
    return {
        **keys,
        "ssm.conv_kernel": c.integer("mamba_d_conv"),
        "ssm.state_size": c.integer("mamba_d_state"),
        "ssm.group_count": c.integer("mamba_n_groups"),
        "ssm.inner_size": c.integer("mamba_expand") * c.integer("hidden_size"),
        "ssm.time_step_rank": c.integer("mamba_n_heads"),
        "attention.head_count_kv": [c.kv_heads if a else 0 for a in _granite_attention(c)],
        "rope.scaling.finetuned": False,
        "context_length": ENDLESS,
    }


def _granite_hybrid(c: Config) -> Architecture:
    """One class of models with and without recurrent layers and experts."""
    rules = (*granite_shared(c), *GRANITE, *_mamba2("mamba_n_groups"))
    if all(_granite_attention(c)):
        kind = "granitemoe" if c.get("num_local_experts") else "granite"
        return replace(DECODERS["GraniteForCausalLM"], name=kind, rules=rules)
    return Architecture("granitehybrid", rules, _granite_hybrid_keys)


def _granite_shared(c: Config) -> Architecture:
    moe = DECODERS["GraniteMoeForCausalLM"]
    return replace(moe, rules=(*granite_shared(c), *moe.rules))


_NEMOTRON_LAYERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe", "linear_attention": "mamba"}


def _nemotron_layers(c: Config) -> list[str]:
    pattern = c.get("hybrid_override_pattern", "layers_block_type")
    if not isinstance(pattern, str | list) or not pattern:
        raise c.refusal("hybrid_override_pattern", pattern, "a letter for each layer")
    kinds = [_NEMOTRON_LAYERS.get(str(kind), str(kind).removeprefix("full_")) for kind in pattern]
    if odd := set(kinds) - {"mamba", "attention", "mlp", "moe"}:
        raise UnsupportedModel(f"{c.path} tells of layers of the kind {min(odd)!r}, which is not known")
    return kinds


def _nemotron_h(c: Config) -> Architecture:
    kinds = _nemotron_layers(c)
    moe = "moe" in kinds
    mixer = (
        rule(r"mixer\.experts\.(up|down)_proj\.weight", Out(r"@ffn_\2_exps.weight")),
        rule(r"mixer\.dt_bias", Out("mixer.dt.bias" if moe else "mixer.dt_proj.bias")),
        *_mamba2("n_groups"),
        *ROTATED,
    )

    def keys(c: Config) -> dict[str, Any]:
        wide = c.integer("moe_intermediate_size" if moe else "intermediate_size")
        heads, size = c.integer("mamba_num_heads"), c.integer("mamba_head_dim")
        keys: dict[str, Any] = {
            **dict.fromkeys(("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count")),
            "context_length": ENDLESS,
            "attention.head_count_kv": [c.kv_heads if k == "attention" else 0 for k in kinds],
            "feed_forward_length": [wide if k in ("mlp", "moe") else 0 for k in kinds],
            **dict.fromkeys(
                ("attention.key_length", "attention.value_length"), c.integer("head_dim", "attention_head_dim")
            ),
            "rope.dimension_count": c.integer("hidden_size") // c.heads,
            "rope.scaling.finetuned": False,
            "attention.layer_norm_rms_epsilon": c.real("layer_norm_epsilon", "norm_eps", "rms_norm_eps"),
            "ssm.conv_kernel": c.integer("conv_kernel"),
            "ssm.state_size": c.integer("ssm_state_size"),
            "ssm.group_count": c.integer("n_groups"),
            "ssm.inner_size": heads * size,
            "ssm.time_step_rank": heads,
        }
        if moe:
            keys |= {
                **experts_keys(c),
                "expert_count": c.integer("n_routed_experts"),
                "expert_used_count": c.integer("num_experts_per_tok"),
                "expert_group_count": c.integer("n_group", default=1),
                "expert_group_used_count": c.integer("topk_group", default=1),
                "expert_shared_feed_forward_length": c.integer("moe_shared_expert_intermediate_size"),
                "expert_weights_norm": bool(c.get("norm_topk_prob", default=True)),
            }
            if c.get("moe_latent_size") is not None:
                keys["moe_latent_size"] = c.integer("moe_latent_size")
        return keys

    return Architecture(
        "nemotron_h_moe" if moe else "nemotron_h",
        mixer,
        keys,
        blocks=lambda c: len(kinds),
        rename=lambda c: ((r"^model\.(?=(layers|embeddings|norm_f)\b)", "backbone."),),
        drop=r"mtp\..*",
    )


def _falcon_h1_keys(c: Config) -> dict[str, Any]:
    inner = c.integer("mamba_d_ssm")
    return {
        "ssm.conv_kernel": c.integer("mamba_d_conv"),
        "ssm.inner_size": inner,
        "ssm.state_size": c.integer("mamba_d_state"),
        "ssm.time_step_rank": inner // max(1, c.integer("mamba_d_head")),
        "ssm.group_count": c.integer("mamba_n_groups"),
    }


def _times(factor: Callable[[Config], float]) -> Callable[[Config], Change | None]:
    """Values times a number, or as they are where that is one."""

    def change(c: Config) -> Change | None:
        f = np.float32(factor(c))
        return None if f == 1 else lambda x, first: x * f

    return change


def _named(*names: str) -> Callable[[Config], Change | None]:
    return _times(lambda c: float(np.prod([c.real(name, default=1.0) for name in names])))


def _mlp(i: int) -> Callable[[Config], Change | None]:
    return _times(lambda c: c.reals("mlp_multipliers", 2)[i])


def _falcon_in(c: Config) -> Change:
    """Gate, input, B, C and time steps have a factor each."""
    inner, state = c.integer("mamba_d_ssm"), c.integer("mamba_n_groups") * c.integer("mamba_d_state")
    sizes = [inner, inner, state, state, c.integer("mamba_n_heads", default=inner // max(1, c.integer("mamba_d_head")))]
    factors = np.array(c.reals("ssm_multipliers", 5), np.float32) * np.float32(c.real("ssm_in_multiplier", default=1.0))
    rows = np.repeat(factors, sizes)[:, None]
    return lambda x, first: x * rows[first : first + len(x)]


FALCON_H1 = (
    rule(r"(mlp|feed_forward)\.down_proj\.weight", Out(r"\2.down_proj.weight", change=_mlp(1))),
    rule(r"(mlp|feed_forward)\.gate_proj\.weight", Out(r"\2.gate_proj.weight", change=_mlp(0))),
    rule(r"k_proj\.weight", Out("k_proj.weight", change=_named("key_multiplier", "attention_in_multiplier"))),
    rule(r"([qv]_proj\.weight)", Out(r"\2", change=_named("attention_in_multiplier"))),
    rule(r"o_proj\.weight", Out("o_proj.weight", change=_named("attention_out_multiplier"))),
    rule(r"out_proj\.weight", Out("out_proj.weight", change=_named("ssm_out_multiplier"))),
    rule(r"in_proj\.weight", Out("in_proj.weight", change=_falcon_in)),
    rule(r"lm_head\.weight", Out("lm_head.weight", change=_named("lm_head_multiplier"))),
    rule(r"embed_tokens\.weight", Out("embed_tokens.weight", change=_named("embedding_multiplier"))),
    *_mamba2("mamba_n_groups"),
)


def _delta_keys(c: Config) -> dict[str, Any]:
    n = c.layers
    keys: dict[str, Any] = {
        **{k: v for k, v in experts_keys(c).items() if "feed_forward" in k},
        "ssm.conv_kernel": c.integer("linear_conv_kernel_dim"),
        "ssm.state_size": c.integer("linear_key_head_dim"),
        "ssm.group_count": c.integer("linear_num_key_heads"),
        "ssm.time_step_rank": c.integer("linear_num_value_heads"),
        "ssm.inner_size": c.integer("linear_value_head_dim") * c.integer("linear_num_value_heads"),
        "full_attention_interval": c.integer("full_attention_interval", default=4),
        "rope.dimension_count": c.rotated(0.25),
    }
    if c.get("layer_types") is not None:
        keys["attention.recurrent_layers"] = [k == "linear_attention" for k in c.strs("layer_types", n)] + [
            False
        ] * c.predictors
    return {**keys, **nextn_keys(c)}


def _qwen35_keys(c: Config) -> dict[str, Any]:
    sections = {} if "mrope_section" in c.rope else {"rope.dimension_sections": [11, 11, 10, 0]}
    return {**_delta_keys(c), **sections}


def _mtp(c: Config) -> tuple[tuple[str, str], ...]:
    """Layers that predict further tokens lie behind the others."""
    first = (r"^model\.mtp\.", "mtp."), (r"^mtp\.layers\.0\.", f"model.layers.{c.layers}.")
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
    return (*first, *((rf"^mtp\.{old}\.", f"blk.{c.layers}.nextn.{new}.") for old, new in names.items()))


def _tiled(rows: Callable[[Config], int]) -> View:
    """Value heads in the order that a repetition of the key heads gives: the first one of each key head, the second, ..."""

    def view(a: np.ndarray, c: Config) -> np.ndarray:
        keys, each = (
            c.integer("linear_num_key_heads"),
            c.integer("linear_num_value_heads") // c.integer("linear_num_key_heads"),
        )
        return a.reshape(keys, each, rows(c), *a.shape[1:]).swapaxes(0, 1)

    return view


def _vector(a: np.ndarray, c: Config) -> np.ndarray:
    return _tiled(lambda c: 1)(a, c)


def _columns(a: np.ndarray, c: Config) -> np.ndarray:
    keys, size = c.integer("linear_num_key_heads"), c.integer("linear_value_head_dim")
    return a.reshape(len(a), keys, -1, size).swapaxes(1, 2)


def _qk(c: Config) -> int:
    return 2 * c.integer("linear_num_key_heads") * c.integer("linear_key_head_dim")


def _value(c: Config) -> int:
    return c.integer("linear_value_head_dim")


_QK = span(lambda c: 0, _qk)
_V = _tiled(_value)
_VALUES: View = lambda a, c: _V(a[_qk(c) :], c)  # noqa: E731
DELTA_NORM = rule(r"(linear_attn\.norm\.weight)", Out(r"\2"))
QWEN35 = (
    rule(r"(in_proj_qkv\.weight)", Out(r"\2", (_QK, _VALUES), like=True)),
    rule(r"(in_proj_z\.weight)", Out(r"\2", (_V,), like=True)),
    rule(r"(in_proj_[ab]\.weight)", Out(r"\2", (_vector,), like=True)),
    rule(r"linear_attn\.A_log", Out("linear_attn.A_log", (_vector,), like=True, change=DECAY)),
    rule(r"linear_attn\.dt_bias", Out("linear_attn.dt_proj.bias", (_vector,), like=True)),
    rule(
        r"(linear_attn\.conv1d\.weight)",
        Out(r"\2", (lambda a, c: squeezed(a, c)[: _qk(c)], lambda a, c: _V(squeezed(a, c)[_qk(c) :], c))),
    ),
    rule(r"(linear_attn\.out_proj\.weight)", Out(r"\2", (_columns,), like=True)),
    DELTA_NORM,
    ADDS_ONE,
    *FUSED_EXPERTS,
)


def _of_key_heads(start: int, stop: int) -> View:
    """Of rows [queries | keys | values | gates] of each key head, one kind; the numbers count parts."""

    def view(a: np.ndarray, c: Config) -> np.ndarray:
        keys, d, v = (c.integer(f"linear_{n}") for n in ("num_key_heads", "key_head_dim", "value_head_dim"))
        r = c.integer("linear_num_value_heads") // keys * v
        at = (0, d, 2 * d, 2 * d + r, 2 * d + 2 * r)
        if a.shape[0] != keys * at[4]:
            raise ValueError
        return a.reshape(keys, at[4], -1)[:, at[start] : at[stop]].reshape(-1, a.shape[-1])

    return view


QWEN3_NEXT = (
    rule(
        r"linear_attn\.in_proj_qkvz\.weight",
        Out("@attn_qkv.weight", tuple(_of_key_heads(i, i + 1) for i in range(3))),
        Out("@attn_gate.weight", (_of_key_heads(3, 4),)),
    ),
    rule(r"(linear_attn\.A_log)", Out(r"\2", change=DECAY)),
    rule(r"linear_attn\.dt_bias", Out("linear_attn.dt_proj.bias")),
    CONV,
    DELTA_NORM,
    ADDS_ONE,
    *FUSED_EXPERTS,
)


def _lfm2_keys(c: Config) -> dict[str, Any]:
    wide = c.integer("block_ff_dim", "intermediate_size")
    if c.get("block_auto_adjust_ff_dim", default=True) and not c.get("moe_intermediate_size"):
        wide = int(c.real("block_ffn_dim_multiplier", default=1.0) * int(2 * wide / 3))
        multiple = c.integer("block_multiple_of", default=256)
        wide = -(-wide // multiple) * multiple
    return {
        "attention.head_count_kv": [c.kv_heads if k == "full_attention" else 0 for k in c.strs("layer_types", c.layers)],
        "shortconv.l_cache": c.integer("conv_L_cache"),
        "attention.layer_norm_rms_epsilon": c.real("norm_eps"),
        "feed_forward_length": wide,
    }


def _lfm2_moe_keys(c: Config) -> dict[str, Any]:
    return {
        **_lfm2_keys(c),
        "expert_feed_forward_length": c.integer("moe_intermediate_size"),
        "leading_dense_block_count": c.integer("num_dense_layers"),
        "expert_gating_func": SIGMOID,
    }


LFM2_EXPERTS = (
    rule(r"\.expert_bias", Out("@exp_probs_b.bias")),
    rule(r"experts\.w1\.weight", Out("@ffn_gate_exps.weight")),
    rule(r"experts\.w2\.weight", Out("@ffn_down_exps.weight")),
    rule(r"experts\.w3\.weight", Out("@ffn_up_exps.weight")),
)

HYBRIDS: Mapping[str, Architecture | Callable[[Config], Architecture]] = {
    "MambaForCausalLM MambaLMHeadModel FalconMambaForCausalLM": Architecture(
        "mamba",
        (CONV, rule(r"(A_log)", Out(r"\2", change=DECAY))),
        _mamba_keys,
        defaults={"tie_word_embeddings": True},
    ),
    "Mamba2ForCausalLM": Architecture(
        "mamba2", _mamba2("n_groups"), _mamba2_keys, rename=lambda c: ((r"^model\.(?=backbone|lm_head)", ""),)
    ),
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "GraniteMoeSharedForCausalLM": _granite_shared,
    "NemotronHForCausalLM": _nemotron_h,
    "FalconH1ForCausalLM": Architecture("falcon-h1", FALCON_H1, _falcon_h1_keys),
    "Qwen3NextForCausalLM": Architecture("qwen3next", QWEN3_NEXT, _delta_keys, blocks=all_blocks, rename=_mtp),
    "Qwen3_5ForConditionalGeneration Qwen3_5ForCausalLM": Architecture(
        "qwen35", QWEN35, _qwen35_keys, blocks=all_blocks, rename=_mtp
    ),
    "Qwen3_5MoeForConditionalGeneration Qwen3_5MoeForCausalLM": Architecture(
        "qwen35moe", QWEN35, _qwen35_keys, blocks=all_blocks, rename=_mtp
    ),
    "Lfm2ForCausalLM LFM2ForCausalLM": Architecture("lfm2", (CONV,), _lfm2_keys),
    "Lfm2MoeForCausalLM": Architecture("lfm2moe", (CONV, *LFM2_EXPERTS), _lfm2_moe_keys),
}
