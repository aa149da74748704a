"""llama: Llama 1 to 3, Mistral, TinyLlama, SmolLM2, Mixtral. RMS norm, rope on interleaved pairs, SiLU-gated feed-forward,
or experts of that kind."""

from __future__ import annotations

from quarrel.models.feedforward import GatedFFN
from quarrel.models.keys import Common, Keys, common, experts
from quarrel.models.mixers import Attention
from quarrel.models.rope import rope_from
from quarrel.models.spec import Layer, ModelSpec, Rope
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    """Llama files may carry `attention.sliding_window` (Mistral v0.1); like llama.cpp, it is not applied."""
    c = common(keys, tensors)
    return decoder(keys, c, rope_from(keys, tensors, "norm", c.head_dim, n_ctx))


def decoder(keys: Keys, c: Common, rope: Rope | None, residual_scale: float = 1.0) -> ModelSpec:
    """The plain pre-norm decoder that llama, qwen, phi3 and granite share."""
    scale = keys.float("attention.scale", 0.0) or c.head_dim**-0.5
    layers = tuple(
        Layer(
            Attention(heads, kv, c.head_dim, scale, rope),
            experts(keys, width, "silu") or GatedFFN("silu", width),
            residual_scale,
        )
        for heads, kv, width in zip(c.n_heads, c.n_kv, c.ffn)
    )
    return ModelSpec(keys.architecture, c.n_vocab, c.n_embd, c.context_length, "rms", c.norm_eps, layers)
