"""The contracts: what a result must be, and who may compute it."""

from __future__ import annotations

from collections.abc import Mapping

from quarrel.ops.activation import CAP, GATED
from quarrel.ops.attention import ATTENTION, KV_APPEND, ROPE_APPEND
from quarrel.ops.contract import Op
from quarrel.ops.embedding import EMBEDDING, GATHER_ROWS
from quarrel.ops.linear import ADD, LINEAR, LINEAR_ADD, NORM_GATE_UP, NORM_LINEAR
from quarrel.ops.norm import NORM
from quarrel.ops.rope import ROPE
from quarrel.ops.sample import SAMPLE

PRIMITIVES: tuple[Op, ...] = (EMBEDDING, GATHER_ROWS, NORM, LINEAR, ADD, GATED, CAP, ROPE, KV_APPEND, ATTENTION, SAMPLE)
"""What a backend must have to run a transformer; each body is its reference."""

COMPOSITES: tuple[Op, ...] = (NORM_LINEAR, NORM_GATE_UP, LINEAR_ADD, ROPE_APPEND)
"""What a backend may take whole; each body is its expansion."""

ALL_OPS: Mapping[str, Op] = {op.name: op for op in (*PRIMITIVES, *COMPOSITES)}
