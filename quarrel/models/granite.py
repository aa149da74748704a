"""granite, dense or with experts: llama with four multipliers, for embedding, residual, attention scores and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quarrel.errors import ModelError
from quarrel.models.decoder import attentions, decoder, feed_forwards
from quarrel.models.keys import Common, Keys, common
from quarrel.models.rope import rope_from
from quarrel.models.spec import Layer, Mixer, ModelSpec, Rope
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    """granite-4.0-micro carries expert and ssm keys that mean nothing without expert tensors."""
    c = common(keys, tensors)
    return family(keys, c, attentions(keys, c, positions(keys, tensors, c.head_dim, n_ctx)))


def family(keys: Keys, c: Common, mixers: Sequence[Mixer]) -> ModelSpec:
    """The decoder with the family's four multipliers (that of attention scores is the mixers')."""
    like = Layer(None, None, keys.float("residual_scale", 1.0))
    read = decoder(keys, c, mixers, feed_forwards(keys, c), like)
    logit_scale = keys.float("logit_scale", 1.0)
    if logit_scale == 0.0:
        raise ModelError(f"{keys.architecture}.logit_scale is 0, and logits are divided by it: the file is inconsistent")
    return replace(read, embedding_scale=keys.float("embedding_scale", 1.0), logit_scale=1.0 / logit_scale)


def positions(keys: Keys, tensors: Tensors, head_dim: int, n_ctx: int) -> Rope | None:
    """`rope.scaling.finetuned` false means that attention has no positions."""
    return rope_from(keys, tensors, "norm", head_dim, n_ctx) if keys.bool("rope.scaling.finetuned", True) else None
