"""granite_swa: granite with windows and attention sinks; the file says which layers rotate."""

from __future__ import annotations

from dataclasses import replace

from quarrel.models.decoder import attentions, windows
from quarrel.models.granite import family, positions
from quarrel.models.keys import Keys, common
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    rope = positions(keys, tensors, c.head_dim, n_ctx)
    ropes = [rope if rotates else None for rotates in keys.bools("attention.rope_pattern", c.n_layers, True)]
    mixers = attentions(keys, c, ropes, windows(keys, c.n_layers))
    return family(keys, c, [replace(a, sinks=True) for a in mixers])
