"""A gated feed-forward and, beside it, experts, each with norms of its own around it; their sum (Gemma 4 26B).

norm1(dense(norm(h))) + norm2(experts(norm3(h)))      the router judges h / rms(h) times its own gain, over sqrt(E)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quarrel.models.cut import Cutter
from quarrel.models.feedforward import experts, gated
from quarrel.models.feedforward.experts import Experts
from quarrel.models.feedforward.gated import GatedFFN
from quarrel.models.kind import Block, Kind
from quarrel.models.spec import FeedForward
from quarrel.ops.contract import Value
from quarrel.ops.linear import add, linear
from quarrel.ops.norm import norm
from quarrel.ops.null import Builder


@dataclass(frozen=True)
class DenseAndExperts(FeedForward):
    """Both read the stream."""

    dense: GatedFFN
    experts: Experts


def feed(b: Builder, block: Block, f: DenseAndExperts, h: Value) -> tuple[Value, None]:
    """The sum, `[T, n_embd]`."""
    y, down = gated.feed(b, block, f.dense, h)
    first = norm(b, replace(block.norm, out="f32"), linear(b, y, *down), *block.gains("post_ffw_norm_1"))
    x = norm(b, block.norm, h, *block.gains("pre_ffw_norm_2"))
    gain = block.tensors.scaled(f"{block.prefix}ffn_gate_inp.scale", block.n_embd, 1.0 / math.sqrt(block.n_embd))
    out = experts.routed(b, block, f.experts, x, norm(b, block.norm, h, gain))
    return add(b, first, norm(b, block.norm, out, *block.gains("post_ffw_norm_2"))), None


def _shard(cut: Cutter, f: DenseAndExperts) -> DenseAndExperts | None:
    dense, routed = gated.shard(cut, f.dense), experts.shard(cut, f.experts)
    return None if dense is None or routed is None else DenseAndExperts(dense, routed)


KIND = Kind(DenseAndExperts, feed, _shard, ("ffn_", "exp_probs"))
