"""granitehybrid (Granite 4 hybrids): granite's multipliers over layers of Mamba-2 or attention, each with a feed-forward.

A layer without key heads is a Mamba-2 layer. Feed-forwards are experts with a shared one, or dense in the small models.
"""

from __future__ import annotations

from quarrel.models.feedforward import GatedFFN
from quarrel.models.granite import positions, residual_scale, scaled
from quarrel.models.keys import Keys, common, experts, mamba2
from quarrel.models.mixers import Attention
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors, hybrid=True)
    rope = positions(keys, tensors, c.head_dim, n_ctx)
    scale = keys.float("attention.scale", 0.0) or c.head_dim**-0.5
    mamba = mamba2(keys)
    layers = tuple(
        Layer(
            Attention(heads, kv, c.head_dim, scale, rope) if kv else mamba,
            experts(keys, width, "silu") or GatedFFN("silu", width),
            residual_scale(keys),
        )
        for heads, kv, width in zip(c.n_heads, c.n_kv, c.ffn)
    )
    return scaled(keys, ModelSpec(keys.architecture, c.n_vocab, c.n_embd, c.context_length, "rms", c.norm_eps, layers))
