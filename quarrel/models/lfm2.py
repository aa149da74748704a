"""lfm2 and lfm2moe (LFM2, LFM2.5): short convolutions where a layer has no key heads, else attention with normalised heads.

The norm in front of the logits is called `token_embd_norm`. Experts, behind leading dense layers, have a sigmoid router.
"""

from __future__ import annotations

from dataclasses import replace

from quarrel.models.decoder import attentions, decoder, feed_forwards
from quarrel.models.keys import Keys, common
from quarrel.models.mixers import ShortConv
from quarrel.models.rope import rope_from
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors, hybrid=True)
    conv = ShortConv(c.n_embd, keys.int("shortconv.l_cache", lo=2, hi=16))
    attention = attentions(keys, c, rope_from(keys, tensors, "neox", c.head_dim, n_ctx))
    read = decoder(keys, c, [a if a.n_kv else conv for a in attention], feed_forwards(keys, c, "sigmoid"))
    return replace(read, final_norm="token_embd_norm")
