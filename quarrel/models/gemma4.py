"""gemma4: gemma3 with heads of another size in full layers, values normalised, perhaps the keys in their place, and scores
that are not scaled. 26B has experts beside each feed-forward; E2B and E4B give each layer a vector of the token, and their
last layers read the keys of earlier ones.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quarrel.models.decoder import decoder, owner, slides
from quarrel.models.feedforward import DenseAndExperts, GatedFFN
from quarrel.models.keys import MAX_WIDTH, Keys, common, experts
from quarrel.models.mixers import Attention
from quarrel.models.rope import rope_from, unscaled
from quarrel.models.spec import FeedForward, Layer, ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    window, sliding = keys.int("attention.sliding_window", lo=1), slides(keys, c.n_layers)
    local_dim = keys.int("attention.key_length_swa", c.head_dim, lo=2, hi=4096)
    full = rope_from(keys, tensors, "neox", c.head_dim, n_ctx)
    n_rot = keys.int("rope.dimension_count_swa", local_dim, lo=2, hi=local_dim)
    local = unscaled(keys, replace(full, n_rot=n_rot), 10000.0)
    owners = c.n_layers - keys.int("attention.shared_kv_layers", 0, hi=c.n_layers)
    routed = experts(keys, MAX_WIDTH, "gelu_tanh")
    full_layers = [il for il, slide in enumerate(sliding) if not slide]
    no_values = not any(f"blk.{il}.attn_v.weight" in tensors for il in full_layers)
    scaled = any(f"blk.{il}.layer_output_scale.weight" in tensors for il in range(c.n_layers))
    mixers, ffns = [], []
    for il, slide in enumerate(sliding):
        reads = None if il < owners else owner(sliding[:owners], slide)
        mixers.append(
            Attention(
                n_heads=c.n_heads[il],
                n_kv=c.n_kv[il],
                head_dim=local_dim if slide else c.head_dim,
                scale=1.0,
                rope=local if slide else full,
                window=window if slide else 0,
                value_norm=True,
                keys_are_values=no_values and not slide,
                reads=reads,
            )
        )
        dense: FeedForward = GatedFFN("gelu_tanh", c.ffn[il])
        ffns.append(DenseAndExperts(GatedFFN("gelu_tanh", c.ffn[il]), replace(routed, gains=True)) if routed else dense)
    read = decoder(keys, c, mixers, ffns, Layer(None, None, post_norms=True, out_scale=scaled))
    return replace(
        read,
        embedding_scale=math.sqrt(c.n_embd),
        logit_cap=keys.float("final_logit_softcapping", 0.0, lo=0.0),
        per_layer=keys.int("embedding_length_per_layer_input", 0, hi=MAX_WIDTH),
    )
