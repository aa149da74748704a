"""The contracts: what a result must be, and who may compute it."""

from __future__ import annotations

from collections.abc import Mapping

from quarrel.ops.activation import CAP, CLAMP, GATED, LARGEST, PLAIN
from quarrel.ops.adjust import ADJUST
from quarrel.ops.attention import ATTENTION, KV_APPEND, ROPE_APPEND
from quarrel.ops.contract import Op
from quarrel.ops.delta import DELTA, DELTA_MIX
from quarrel.ops.embedding import EMBEDDING, GATHER_ROWS, PUT_ROWS
from quarrel.ops.encode import ADD_ROW, ENCODE, MEAN_ROWS
from quarrel.ops.heads import HEAD_LINEAR
from quarrel.ops.linear import ADD, LINEAR, LINEAR_ADD, NORM_GATE_UP, NORM_LINEAR
from quarrel.ops.logprobs import LOGPROBS
from quarrel.ops.lora import CHOSEN_LINEAR, LORA
from quarrel.ops.mixer import MAMBA2_MIX, SCAN1_GATE
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ROUTE
from quarrel.ops.norm import NORM
from quarrel.ops.position import BY_POSITION
from quarrel.ops.rope import ROPE
from quarrel.ops.sample import SAMPLE
from quarrel.ops.state import CONV, GATED_NORM, SCAN1, SCAN2
from quarrel.ops.streams import MATCH_STREAMS, MIX_STREAMS, PICK_STREAMS

PRIMITIVES: tuple[Op, ...] = (
    *(EMBEDDING, GATHER_ROWS, NORM, LINEAR, ADD, GATED, CAP, ROPE, KV_APPEND, ATTENTION, ADJUST, SAMPLE, LOGPROBS),
)
"""What a backend must have to run a transformer; each body is its reference."""

COMPOSITES: tuple[Op, ...] = (NORM_LINEAR, NORM_GATE_UP, LINEAR_ADD, ROPE_APPEND)
"""What a backend may take whole; each body is its expansion."""

ALL_OPS: Mapping[str, Op] = {op.name: op for op in (*PRIMITIVES, *COMPOSITES)}
"""The ops of a transformer, which every backend has."""

EXTRA_OPS: Mapping[str, Op] = {
    op.name: op
    for op in (
        CONV,
        SCAN1,
        SCAN2,
        GATED_NORM,
        MAMBA2_MIX,
        SCAN1_GATE,
        DELTA,
        DELTA_MIX,
        ROUTE,
        EXPERT_UP,
        EXPERT_DOWN,
        PLAIN,
        ENCODE,
        ADD_ROW,
        MEAN_ROWS,
        CHOSEN_LINEAR,
        LORA,
        BY_POSITION,
        HEAD_LINEAR,
        CLAMP,
        LARGEST,
        PUT_ROWS,
        PICK_STREAMS,
        MIX_STREAMS,
        MATCH_STREAMS,
    )
}
"""State spaces, experts, encoders, adapters, maps of single heads, several streams, images: contracts and references. A
backend without one refuses what needs it."""
