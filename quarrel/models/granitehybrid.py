"""granitehybrid (Granite 4 hybrids): granite's multipliers over layers of Mamba-2 or attention, each with a feed-forward.

A layer without key heads is a Mamba-2 layer. Feed-forwards are experts with a shared one, or dense in the small models.
"""

from __future__ import annotations

from quarrel.models.decoder import attentions
from quarrel.models.granite import family, positions
from quarrel.models.keys import Keys, common, mamba2
from quarrel.models.spec import ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors, hybrid=True)
    mamba = mamba2(keys)
    attention = attentions(keys, c, positions(keys, tensors, c.head_dim, n_ctx))
    return family(keys, c, [a if a.n_kv else mamba for a in attention])
