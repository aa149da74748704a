"""nemotron_h and nemotron_h_moe (Nemotron-H, Nemotron 3): one mixer a layer, Mamba-2, attention without positions, or a
squared-ReLU feed-forward, dense or with experts behind a sigmoid router.

A layer with a feed-forward length is a feed-forward; else one with key heads is attention; else Mamba-2. Trailing
multi-token-prediction blocks are skipped. The files' rope keys are not used.
"""

from __future__ import annotations

from quarrel.models.feedforward import PlainFFN
from quarrel.models.keys import Common, Keys, common, experts, mamba2
from quarrel.models.mixers import Attention, Mamba2
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors, hybrid=True)
    mamba = mamba2(keys)
    layers = tuple(_layer(keys, c, mamba, il) for il in range(c.n_layers))
    return ModelSpec(keys.architecture, c.n_vocab, c.n_embd, c.context_length, "rms", c.norm_eps, layers)


def _layer(keys: Keys, c: Common, mamba: Mamba2, il: int) -> Layer:
    if c.ffn[il]:
        routed = experts(keys, c.ffn[il], "relu2", "sigmoid")
        return Layer(None, routed or PlainFFN("relu2", c.ffn[il]), ffn_norm="attn_norm")
    if c.n_kv[il]:
        return Layer(Attention(c.n_heads[il], c.n_kv[il], c.head_dim, c.head_dim**-0.5, None), None)
    return Layer(mamba, None)
