"""gemma2: norms around both halves, GELU-gated feed-forward, soft caps, a sliding window on every other layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quarrel.models.feedforward import GatedFFN
from quarrel.models.keys import Common, Keys, common
from quarrel.models.mixers import Attention
from quarrel.models.rope import rope_from
from quarrel.models.spec import Layer, ModelSpec, Rope
from quarrel.models.tensors import Tensors

LAYERS_27B = 46


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    window = keys.int("attention.sliding_window", 4096, lo=1)
    sliding = slides(keys, c.n_layers, 2)
    mixers = attentions(
        c,
        [rope] * c.n_layers,
        [window if slide else 0 for slide in sliding],
        score_scale(c, LAYERS_27B),
        keys.float("attn_logit_softcapping", 50.0, lo=0.0),
    )
    return gemma(keys, c, mixers, keys.float("final_logit_softcapping", 30.0, lo=0.0))


def slides(keys: Keys, n_layers: int, period: int) -> list[bool]:
    """Which layers see only the window: the file's flags or period, else all but the last of each default period."""
    key = f"{keys.architecture}.attention.sliding_window_pattern"
    if isinstance(keys.metadata.get(key), list):
        return keys.metadata.bools(key, count=n_layers)
    period = keys.int("attention.sliding_window_pattern", period, lo=1)
    return [il % period < period - 1 for il in range(n_layers)]


def score_scale(c: Common, layers_27b: int) -> float:
    """The 27B models scale by the width per head, which differs from their head size."""
    return 1.0 / math.sqrt(c.n_embd / c.n_heads[0] if c.n_layers == layers_27b else c.head_dim)


def attentions(
    c: Common, ropes: Sequence[Rope], windows: Sequence[int], scale: float, cap: float = 0.0
) -> tuple[Attention, ...]:
    return tuple(
        Attention(heads, kv, c.head_dim, scale, rope, window, cap)
        for heads, kv, rope, window in zip(c.n_heads, c.n_kv, ropes, windows)
    )


def gemma(keys: Keys, c: Common, mixers: Sequence[Attention], logit_cap: float = 0.0) -> ModelSpec:
    layers = tuple(Layer(mixer, GatedFFN("gelu_tanh", width), post_norms=True) for mixer, width in zip(mixers, c.ffn))
    return ModelSpec(
        keys.architecture,
        c.n_vocab,
        c.n_embd,
        c.context_length,
        "rms",
        c.norm_eps,
        layers,
        embedding_scale=math.sqrt(c.n_embd),
        logit_cap=logit_cap,
    )
