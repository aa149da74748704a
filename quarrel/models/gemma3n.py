"""gemma3n: four residual streams and a low-rank map beside each attention (`models/altup.py`), a vector of the token for
each layer, the largest gates only in the first feed-forwards, and last layers that read the keys of earlier ones.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quarrel.errors import UnsupportedModel
from quarrel.models.decoder import decoder, owner, slides
from quarrel.models.feedforward import GatedFFN
from quarrel.models.keys import MAX_WIDTH, Keys, common
from quarrel.models.mixers import Attention
from quarrel.models.rope import rope_from, unscaled
from quarrel.models.spec import Layer, ModelSpec
from quarrel.models.tensors import Tensors

LAUREL = 64
"""Rank of the map beside attention, for which there is no key."""
OWNERS, SPARSE, DEVIATIONS = 20, 10, 1.6448535919189453
"""Of files that do not say: layers with keys of their own, layers with few gates, and what counts among these, the largest
5% of a normal distribution."""


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    window, sliding = keys.int("attention.sliding_window", lo=1), slides(keys, c.n_layers, 5)
    full = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    local = unscaled(keys, full, 10000.0)
    shared = keys.int("attention.shared_kv_layers", max(0, c.n_layers - OWNERS), hi=c.n_layers)
    owners = c.n_layers - shared
    streams, active = keys.int("altup.num_inputs", 4, lo=2, hi=16), keys.int("altup.active_idx", 0)
    if active:
        raise UnsupportedModel(f"gemma3n.altup.active_idx is {active}; Quarrel wants 0, the first stream")
    deviations = [DEVIATIONS] * min(SPARSE, c.n_layers) + [-math.inf] * max(0, c.n_layers - SPARSE)
    if "activation_sparsity_scale" in keys:
        deviations = keys.metadata.floats("gemma3n.activation_sparsity_scale", finite=False, count=c.n_layers)
    mixers = [
        Attention(
            n_heads=c.n_heads[il],
            n_kv=c.n_kv[il],
            head_dim=c.head_dim,
            scale=1.0,
            rope=local if slide else full,
            window=window if slide else 0,
            value_norm=True,
            reads=None if il < owners else owner(sliding[:owners], slide),
        )
        for il, slide in enumerate(sliding)
    ]
    ffns = [GatedFFN("gelu_tanh", width, by if math.isfinite(by) else None) for width, by in zip(c.ffn, deviations)]
    read = decoder(keys, c, mixers, ffns, Layer(None, None, post_norms=True, laurel=LAUREL))
    return replace(
        read,
        embedding_scale=math.sqrt(c.n_embd),
        logit_cap=keys.float("final_logit_softcapping", 30.0, lo=0.0),
        per_layer=keys.int("embedding_length_per_layer_input", 256, lo=1, hi=MAX_WIDTH),
        streams=streams,
    )
