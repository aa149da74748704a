"""nomic-bert (nomic-embed-text): bert with rope in place of learned positions and a SiLU-gated feed-forward."""

from __future__ import annotations

from dataclasses import replace

from quarrel.models.bert import encoder, head_sizes
from quarrel.models.feedforward import GatedFFN
from quarrel.models.keys import MAX_WIDTH, Keys
from quarrel.models.rope import rope_from
from quarrel.models.spec import EncoderSpec
from quarrel.models.tensors import Tensors

TASKS = ("search_document", "search_query", "clustering", "classification")


def spec(keys: Keys, tensors: Tensors, n_ctx: int) -> EncoderSpec:
    rope = rope_from(keys, tensors, "neox", head_sizes(keys)[2], n_ctx)
    ffn = GatedFFN("silu", keys.int("feed_forward_length", lo=1, hi=MAX_WIDTH))
    read = encoder(keys, tensors, rope, ffn, learned_positions=False)
    return replace(read, tasks=TASKS, centred_truncation=True)
