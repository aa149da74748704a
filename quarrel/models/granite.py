"""granite (dense): llama with four multipliers, for the embedding, the residual, the attention scores and the logits."""

from __future__ import annotations

from dataclasses import replace

from quarrel.errors import ModelError
from quarrel.models.keys import Keys, common, refuse_experts
from quarrel.models.llama import decoder
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    """`rope.scaling.finetuned` false means that attention has no positions."""
    refuse_experts(keys)
    c = common(keys, tensors)
    rope = rope_from(keys, tensors, "norm", c.head_dim, n_ctx) if keys.bool("rope.scaling.finetuned", True) else None
    logit_scale = keys.float("logit_scale", 1.0)
    if logit_scale == 0.0:
        raise ModelError("granite.logit_scale is 0, and logits are divided by it: the file is inconsistent")
    return replace(
        decoder(keys, c, rope, keys.float("residual_scale", 1.0)),
        embedding_scale=keys.float("embedding_scale", 1.0),
        logit_scale=1.0 / logit_scale,
    )
