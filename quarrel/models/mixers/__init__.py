"""The kinds of mixer. A new one is a file with its spec, block, shard rule and state, and its `KIND` in this table."""

from __future__ import annotations

from collections.abc import Mapping

from quarrel.models.feedforward import FEED_FORWARDS
from quarrel.models.kind import Kind
from quarrel.models.mixers import attention, delta, latent, mamba1, mamba2, parallel, shortconv
from quarrel.models.mixers.attention import Attention
from quarrel.models.mixers.delta import GatedDelta
from quarrel.models.mixers.latent import LatentAttention
from quarrel.models.mixers.mamba1 import Mamba1
from quarrel.models.mixers.mamba2 import Mamba2
from quarrel.models.mixers.parallel import Parallel
from quarrel.models.mixers.shortconv import ShortConv

_KINDS = (attention.KIND, latent.KIND, mamba1.KIND, mamba2.KIND, delta.KIND, shortconv.KIND)
_ALONE: Mapping[type, Kind] = {kind.spec: kind for kind in _KINDS}
MIXERS: Mapping[type, Kind] = {**_ALONE, Parallel: parallel.kind({**_ALONE, **FEED_FORWARDS})}

__all__ = ["MIXERS", "Attention", "GatedDelta", "LatentAttention", "Mamba1", "Mamba2", "Parallel", "ShortConv"]
