"""A model as data: frozen facts that an architecture file reads out of a GGUF header and the one assembly walks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quarrel.ops.activation import Activation, PlainActivation
from quarrel.ops.moe import ExpertActivation, Gate


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
    sinks: bool = False


@dataclass(frozen=True)
class Mamba1:
    """Convolution and selective scan with a step size per channel; `rank` is the width of the step's bottleneck.

    `normed` (FalconMamba): the bottleneck, B and C are each RMS-normalised, without a gain.
    """

    inner: int
    n_state: int
    rank: int
    conv_width: int
    normed: bool = False


@dataclass(frozen=True)
class Mamba2:
    """Convolution, selective scan over heads, gated norm over groups."""

    n_heads: int
    head_dim: int
    n_groups: int
    n_state: int
    conv_width: int

    @property
    def inner(self) -> int:
        return self.n_heads * self.head_dim


Mixer = Attention | Mamba1 | Mamba2


@dataclass(frozen=True)
class GatedFFN:
    """down(activation(gate x) * up x)."""

    activation: Activation
    width: int


@dataclass(frozen=True)
class PlainFFN:
    """down(activation(up x)), without a gate."""

    activation: PlainActivation
    width: int


@dataclass(frozen=True)
class Experts:
    """`used` of `n_experts` feed-forwards a token, weighted, plus a shared one of width `shared` if that is not 0."""

    n_experts: int
    used: int
    width: int
    activation: ExpertActivation
    gate: Gate = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    shared: int = 0
    n_groups: int = 1
    groups_used: int = 1


FeedForward = GatedFFN | PlainFFN | Experts


@dataclass(frozen=True)
class Layer:
    """h += residual_scale * mixer(norm(h)); h += residual_scale * ffn(norm(h)). Either half may be missing.

    With `post_norms` each half is normalised once more before it is added (Gemma 2 and 3). `ffn_norm` is the name of the
    tensor in front of the feed-forward.
    """

    mixer: Mixer | None
    ffn: FeedForward | None
    residual_scale: float = 1.0
    post_norms: bool = False
    ffn_norm: str = "ffn_norm"


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


@dataclass(frozen=True)
class EncoderSpec:
    """A bidirectional encoder: norms after each half, no cache, hidden states out."""

    architecture: str
    n_vocab: int
    n_embd: int
    context_length: int
    norm_eps: float
    n_layers: int
    attention: Attention
    ffn: FeedForward
    learned_positions: bool
    pooling: Literal["none", "mean", "cls", "last", "rank"]

    norm: Literal["layer"] = "layer"
    tasks: tuple[str, ...] = ()
    """Names of the prefixes it was trained with: "search_query" stands for the text "search_query: "."""
    centred_truncation: bool = False
    """Rows are normalised to mean 0 and variance 1 before they are cut short."""
