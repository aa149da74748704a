"""A model as data: frozen facts that an architecture file reads out of a GGUF header and the one assembly walks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rope:
    """Rotation of the first `n_rot` values of a head, all context scaling included in `freq` and `magnitude`."""

    style: Literal["norm", "neox"]
    n_rot: int
    freq: tuple[float, ...]
    magnitude: float = 1.0
    axes: int = 1
    """Positions of a token, each with frequencies of its own, one after the other (`ops/rope.py`)."""


@dataclass(frozen=True)
class Temperature:
    """What queries are multiplied by: the i-th factor for the i-th `size` positions, counted from -`shift`."""

    factors: tuple[float, ...]
    size: int
    shift: int = 0


class Mixer:
    """The half of a layer that mixes tokens; its kinds are the dataclasses of `models/mixers/`."""

    reads: int | None = None
    """The layer whose keys and values it attends to, if it has none of its own."""


class FeedForward:
    """The other half; its kinds are the dataclasses of `models/feedforward/`."""


@dataclass(frozen=True)
class Layer:
    """h += residual_scale * mixer(norm(h)); h += residual_scale * ffn(norm(h)). Either half may be missing.

    With `post_norms` each half is normalised once more before it is added (Gemma 2 and 3), without `pre_norms` only then
    (OLMo 2), with `post_norm_eps` if that is not 0. `ffn_norm` is the name of the tensor in front of the feed-forward.
    """

    mixer: Mixer | None
    ffn: FeedForward | None
    residual_scale: float = 1.0
    post_norms: bool = False
    pre_norms: bool = True
    attn_norm: str = "attn_norm"
    """Empty where there is none."""
    ffn_norm: str = "ffn_norm"
    post_norm_eps: float = 0.0
    out_scale: bool = False
    """The stream behind the layer is multiplied by the number in layer_output_scale."""
    laurel: int = 0
    """Rank of a map of the mixer's input that is added beside the mixer (`models/altup.py`), 0 for none."""


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
    embedding_norm: bool = False
    """Embeddings are normalised, without a gain."""
    final_norm: str = "output_norm"
    """The name of the tensor in front of the logits."""
    per_layer: int = 0
    """Width of what each layer gets of the tokens by themselves (`models/per_layer.py`), 0 for none."""
    streams: int = 1
    """Residual streams, of which the layers read and write the first; the others follow it (`models/altup.py`)."""
    image_parts: int = 0
    """Rows of the model's width that stand for an image's token, 0 where it sees none: the first takes the place of its
    embedding, the others are added behind the first layers."""


@dataclass(frozen=True)
class EncoderSpec:
    """A bidirectional encoder: no cache, hidden states out. Norms come after each half, or where its `layers` have them."""

    architecture: str
    n_vocab: int
    n_embd: int
    context_length: int
    norm_eps: float
    n_layers: int
    attention: Mixer
    ffn: FeedForward
    learned_positions: bool
    pooling: Literal["none", "mean", "cls", "last", "rank"]

    norm: Literal["rms", "layer"] = "layer"
    layers: tuple[Layer, ...] = ()
    """Of an encoder that is built as decoders are; `attention` and `ffn` are then those of the first."""
    embedding_scale: float = 1.0
    embedding_norm: bool = True
    tasks: tuple[str, ...] = ()
    """Names of the prefixes it was trained with: "search_query" stands for the text "search_query: "."""
    centred_truncation: bool = False
    """Rows are normalised to mean 0 and variance 1 before they are cut short."""
