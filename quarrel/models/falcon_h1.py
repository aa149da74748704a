"""falcon-h1: every layer has attention and Mamba-2 side by side. Multipliers are folded into the weights."""

from __future__ import annotations

from dataclasses import replace

from quarrel.models.decoder import attentions, decoder, feed_forwards
from quarrel.models.keys import Keys, common, mamba2
from quarrel.models.mixers import Parallel
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    normed = any(f"blk.{il}.ssm_norm.weight" in tensors for il in range(c.n_layers))
    mamba = replace(mamba2(keys), normed=normed)
    attention = attentions(keys, c, rope_from(keys, tensors, "neox", c.head_dim, n_ctx))
    return decoder(keys, c, [Parallel((a, mamba)) for a in attention], feed_forwards(keys, c))
