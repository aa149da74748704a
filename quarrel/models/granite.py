"""granite, dense or with experts: llama with four multipliers, for embedding, residual, attention scores and logits."""

from __future__ import annotations

from dataclasses import replace

from quarrel.errors import ModelError
from quarrel.models.keys import Keys, common
from quarrel.models.llama import decoder
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec, Rope
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    """granite-4.0-micro carries expert and ssm keys that mean nothing without expert tensors."""
    c = common(keys, tensors)
    return scaled(keys, decoder(keys, c, positions(keys, tensors, c.head_dim, n_ctx), residual_scale(keys)))


def positions(keys: Keys, tensors: Tensors, head_dim: int, n_ctx: int) -> Rope | None:
    """`rope.scaling.finetuned` false means that attention has no positions."""
    return rope_from(keys, tensors, "norm", head_dim, n_ctx) if keys.bool("rope.scaling.finetuned", True) else None


def residual_scale(keys: Keys) -> float:
    """What each half is multiplied by before it is added."""
    return keys.float("residual_scale", 1.0)


def scaled(keys: Keys, spec: ModelSpec) -> ModelSpec:
    """The spec with the family's embedding and logit multipliers."""
    logit_scale = keys.float("logit_scale", 1.0)
    if logit_scale == 0.0:
        raise ModelError(f"{keys.architecture}.logit_scale is 0, and logits are divided by it: the file is inconsistent")
    return replace(spec, embedding_scale=keys.float("embedding_scale", 1.0), logit_scale=1.0 / logit_scale)
