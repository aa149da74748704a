"""qwen35, qwen35moe (Qwen3.5, 3.6) and qwen3next: gated delta nets and, every fourth layer, attention with a gate and a
partial rotation. The feed-forward is gated, or experts with a gated shared one. Blocks that predict further tokens are
read by `assemble_predictor` only.

qwen3next keeps the value heads of one key side by side; the others have one of every key after the other.
"""

from __future__ import annotations

from dataclasses import replace

from quarrel.errors import ModelError
from quarrel.models.decoder import attentions, decoder, feed_forwards
from quarrel.models.feedforward import Experts
from quarrel.models.keys import MAX_WIDTH, Keys, common
from quarrel.models.mixers import GatedDelta
from quarrel.models.rope import rope_from
from quarrel.models.spec import FeedForward, Layer, ModelSpec
from quarrel.models.tensors import Tensors


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> ModelSpec:
    c = common(keys, tensors)
    attention = attentions(keys, c, rope_from(keys, tensors, "neox", c.head_dim, n_ctx))
    delta, recurrent = _delta(keys), _recurrent(keys, c.n_layers)
    mixers = [delta if linear else replace(a, gate="in query") for linear, a in zip(recurrent, attention)]
    routed = [_shared_gate(ffn) for ffn in feed_forwards(keys, c)]
    return decoder(keys, c, mixers, routed, Layer(None, None, ffn_norm="post_attention_norm"))


def _shared_gate(ffn: FeedForward) -> FeedForward:
    return replace(ffn, renormalise=True, shared_gate=ffn.shared > 0) if isinstance(ffn, Experts) else ffn


def _recurrent(keys: Keys, n_layers: int) -> list[bool]:
    """Which layers are delta nets: the file's flags, or all but the last of each period."""
    if keys.has_list("attention.recurrent_layers"):
        return keys.bools("attention.recurrent_layers", n_layers)
    period = keys.int("full_attention_interval", 4, lo=1)
    return [(il + 1) % period != 0 for il in range(n_layers)]


def _delta(keys: Keys) -> GatedDelta:
    inner = keys.int("ssm.inner_size", lo=1, hi=MAX_WIDTH)
    n_v = keys.int("ssm.time_step_rank", lo=1, hi=inner)
    n_k = keys.int("ssm.group_count", lo=1, hi=n_v)
    if inner % n_v or n_v % n_k:
        raise ModelError(f"ssm sizes {inner}, {n_v} value heads and {n_k} keys do not divide: the file is inconsistent")
    return GatedDelta(
        n_k=n_k,
        n_v=n_v,
        k_dim=keys.int("ssm.state_size", lo=1, hi=4096),
        v_dim=inner // n_v,
        conv_width=keys.int("ssm.conv_kernel", lo=2, hi=16),
        grouped=keys.architecture == "qwen3next",
    )
