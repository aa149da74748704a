"""bert (all-MiniLM, bge): an encoder with learned positions, biases everywhere and GELU in its exact form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from quarrel.errors import ModelError, UnsupportedModel
from quarrel.models.feedforward import PlainFFN
from quarrel.models.keys import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Common, Keys
from quarrel.models.mixers import Attention
from quarrel.models.spec import EncoderSpec, FeedForward, Layer, Rope
from quarrel.models.tensors import Tensors

Pooling = Literal["none", "mean", "cls", "last", "rank"]
POOLING: tuple[Pooling, ...] = ("none", "mean", "cls", "last", "rank")


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> EncoderSpec:
    width = keys.int("feed_forward_length", lo=1, hi=MAX_WIDTH)
    return encoder(keys, tensors, None, PlainFFN("gelu_erf", width), learned_positions=True)


def encoder(keys: Keys, tensors: Tensors, rope: Rope | None, ffn: FeedForward, *, learned_positions: bool) -> EncoderSpec:
    """What bert and nomic-bert share."""
    if keys.bool("attention.causal", False):
        raise UnsupportedModel(f"{keys.architecture}.attention.causal is true; encoders here are bidirectional")
    n_embd, heads, dim = head_sizes(keys)
    return EncoderSpec(
        architecture=keys.architecture,
        n_vocab=tensors.shape("token_embd.weight")[0],
        n_embd=n_embd,
        context_length=keys.int("context_length", lo=1),
        norm_eps=keys.float("attention.layer_norm_epsilon", lo=0.0),
        n_layers=keys.int("block_count", lo=1, hi=MAX_LAYERS),
        attention=Attention(heads, heads, dim, dim**-0.5, rope),
        ffn=ffn,
        learned_positions=learned_positions,
        pooling=POOLING[keys.int("pooling_type", 1, hi=len(POOLING) - 1)],
    )


def like_decoder(keys: Keys, c: Common, layers: Sequence[Layer], norm: Literal["rms", "layer"]) -> EncoderSpec:
    """An encoder whose layers are a decoder's, but for their attention."""
    if keys.bool("attention.causal", False):
        raise UnsupportedModel(f"{keys.architecture}.attention.causal is true; encoders here are bidirectional")
    first = layers[0]
    assert first.mixer is not None and first.ffn is not None  # noqa: PT018
    return EncoderSpec(
        architecture=keys.architecture,
        n_vocab=c.n_vocab,
        n_embd=c.n_embd,
        context_length=c.context_length,
        norm_eps=c.norm_eps,
        n_layers=len(layers),
        attention=first.mixer,
        ffn=first.ffn,
        learned_positions=False,
        pooling=POOLING[keys.int("pooling_type", 1, hi=len(POOLING) - 1)],
        norm=norm,
        layers=tuple(layers),
    )


def head_sizes(keys: Keys) -> tuple[int, int, int]:
    """Width, heads and head size."""
    n_embd = keys.int("embedding_length", lo=1, hi=MAX_WIDTH)
    heads = keys.int("attention.head_count", lo=1, hi=MAX_HEADS)
    if n_embd % heads or n_embd == heads:
        raise ModelError(f"embedding_length {n_embd} does not divide into {heads} heads: the file is inconsistent")
    return n_embd, heads, n_embd // heads
