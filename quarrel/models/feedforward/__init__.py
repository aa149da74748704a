"""The kinds of feed-forward. A new one is a file with its spec, block and shard rule, and its `KIND` in this table."""

from __future__ import annotations

from collections.abc import Mapping

from quarrel.models.feedforward import dense_and_experts, experts, gated, plain
from quarrel.models.feedforward.dense_and_experts import DenseAndExperts
from quarrel.models.feedforward.experts import Experts
from quarrel.models.feedforward.gated import GatedFFN
from quarrel.models.feedforward.plain import PlainFFN
from quarrel.models.kind import Kind

FEED_FORWARDS: Mapping[type, Kind] = {
    kind.spec: kind for kind in (gated.KIND, plain.KIND, experts.KIND, dense_and_experts.KIND)
}

__all__ = ["FEED_FORWARDS", "DenseAndExperts", "Experts", "GatedFFN", "PlainFFN"]
