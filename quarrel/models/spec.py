"""A model as data: frozen facts that an architecture file reads out of a GGUF header and the one assembly walks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quarrel.ops.activation import Activation


@dataclass(frozen=True)
class Rope:
    """Rotation of the first `n_rot` values of a head, all context scaling included in `freq` and `magnitude`."""

    style: Literal["norm", "neox"]
    n_rot: int
    freq: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True)
class Attention:
    """Self-attention over a key/value cache. `window` and `cap` are off at 0; `rope` None means no positions."""

    n_heads: int
    n_kv: int
    head_dim: int
    scale: float
    rope: Rope | None
    window: int = 0
    cap: float = 0.0


@dataclass(frozen=True)
class GatedFFN:
    """down(activation(gate x) * up x)."""

    activation: Activation
    width: int


@dataclass(frozen=True)
class Layer:
    """h += residual_scale * mixer(norm(h)); h += residual_scale * ffn(norm(h)).

    With `post_norms` each half is normalised once more before it is added (Gemma 2 and 3).
    """

    mixer: Attention
    ffn: GatedFFN
    residual_scale: float = 1.0
    post_norms: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """Everything static about a decoder."""

    architecture: str
    n_vocab: int
    n_embd: int
    context_length: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    layers: tuple[Layer, ...]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    """Logits are multiplied by this, then capped at `logit_cap` if that is not 0."""
    logit_cap: float = 0.0
