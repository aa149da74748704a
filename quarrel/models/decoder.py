"""What the decoders share: attention and feed-forward of each layer from the usual keys, and the model made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from quarrel.errors import ModelError
from quarrel.gguf import REQUIRED
from quarrel.models.feedforward import GatedFFN
from quarrel.models.keys import Common, Keys, experts
from quarrel.models.mixers import Attention
from quarrel.models.spec import FeedForward, Layer, Mixer, ModelSpec, Rope, Temperature
from quarrel.ops.moe import Gate

PLAIN = Layer(None, None)
MOST_FACTORS = 1 << 16


def decoder(
    keys: Keys,
    c: Common,
    mixers: Sequence[Mixer],
    ffns: Sequence[FeedForward | None],
    like: Layer = PLAIN,
    norm: Literal["rms", "layer"] = "rms",
) -> ModelSpec:
    """The model whose layers are `like` this one, each with its own mixer and feed-forward."""
    layers = tuple(replace(like, mixer=mixer, ffn=ffn) for mixer, ffn in zip(mixers, ffns, strict=True))
    return ModelSpec(keys.architecture, c.n_vocab, c.n_embd, c.context_length, norm, c.norm_eps, layers)


def attentions(
    keys: Keys, c: Common, ropes: Rope | Sequence[Rope | None] | None, windows: Sequence[int] = ()
) -> list[Attention]:
    """The attention of each layer; one rotation stands for all of them."""
    scale = keys.float("attention.scale", 0.0) or c.head_dim**-0.5
    rotations = ropes if isinstance(ropes, Sequence) else [ropes] * c.n_layers
    each = zip(c.n_heads, c.n_kv, rotations, windows or [0] * c.n_layers, strict=True)
    return [Attention(heads, kv, c.head_dim, scale, rope, window) for heads, kv, rope, window in each]


def feed_forwards(keys: Keys, c: Common, gate: Gate = "softmax") -> list[FeedForward]:
    """SiLU-gated feed-forwards, or experts of that kind: in all layers, or only after the first few and in every n-th."""
    dense = keys.int("leading_dense_block_count", 0, hi=c.n_layers)
    step = keys.int("interleave_moe_layer_step", 1, hi=c.n_layers) or c.n_layers + 1
    routed = [il >= dense and (il + 1) % step == 0 for il in range(c.n_layers)]
    return [
        (experts(keys, width, "silu", gate) if route else None) or GatedFFN("silu", width)
        for width, route in zip(c.ffn, routed)
    ]


def temperature(strength: float, size: int, n_ctx: int, shift: int = 0) -> Temperature:
    """1 + strength * ln(1 + i) for the i-th `size` positions."""
    count = (n_ctx + shift) // size + 1
    if count > MOST_FACTORS:
        raise ModelError(
            f"attention sharpens every {size} tokens of a context of {n_ctx}; Quarrel wants {MOST_FACTORS} steps at most:"
            " the file is inconsistent"
        )
    return Temperature(tuple(1.0 + strength * math.log1p(i) for i in range(count)), size, shift)


def windows(keys: Keys, n_layers: int, period: int = REQUIRED, default: int = REQUIRED) -> list[int]:
    """How many keys each layer sees, 0 for all of them."""
    window = keys.int("attention.sliding_window", default, lo=1)
    return [window if slide else 0 for slide in slides(keys, n_layers, period)] if window else [0] * n_layers


def slides(keys: Keys, n_layers: int, period: int = REQUIRED) -> list[bool]:
    """Which layers see only the window: the file's flags or period, else all but the last of each default period."""
    if keys.has_list("attention.sliding_window_pattern"):
        return keys.bools("attention.sliding_window_pattern", n_layers)
    period = keys.int("attention.sliding_window_pattern", period, lo=1)
    return [il % period < period - 1 for il in range(n_layers)]


def owner(sliding: list[bool], slide: bool) -> int:
    """The last layer of this kind that has keys of its own."""
    found = [il for il, kind in enumerate(sliding) if kind == slide]
    if not found:
        raise ModelError(
            "attention.shared_kv_layers leaves no layer whose keys the last ones could read: the file contradicts itself"
        )
    return found[-1]
