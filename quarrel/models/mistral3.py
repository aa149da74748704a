"""mistral3 (Ministral 3, Mistral Small 3, Devstral): llama with YaRN, and queries that grow with their position."""

from __future__ import annotations

from dataclasses import replace

from quarrel.models.decoder import attentions, decoder, feed_forwards, temperature
from quarrel.models.keys import Keys, common
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    mixers = attentions(keys, c, rope_from(keys, tensors, "norm", c.head_dim, n_ctx))
    strength = keys.float("attention.temperature_scale", 0.0)
    if strength:
        original = keys.int("rope.scaling.original_context_length", lo=1)
        sharpened = temperature(strength, original, c.context_length)
        mixers = [replace(a, temperature=sharpened) for a in mixers]
    return decoder(keys, c, mixers, feed_forwards(keys, c))
