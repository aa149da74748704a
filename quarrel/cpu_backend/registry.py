"""Which implementation takes which op on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quarrel.cpu_backend import collective, lower_experts, lower_recurrent
from quarrel.cpu_backend import lower_transformer as t
from quarrel.ops import (
    ADD,
    ADD_ROW,
    ATTENTION,
    CAP,
    CHOSEN_LINEAR,
    CONV,
    EMBEDDING,
    ENCODE,
    EXPERT_DOWN,
    EXPERT_UP,
    GATED,
    GATED_NORM,
    GATHER_ROWS,
    KV_APPEND,
    LINEAR,
    LINEAR_ADD,
    LOGPROBS,
    MEAN_ROWS,
    NORM,
    NORM_GATE_UP,
    NORM_LINEAR,
    PLAIN,
    ROPE,
    ROPE_APPEND,
    ROUTE,
    SAMPLE,
    SCAN1,
    SCAN2,
)
from quarrel.ops.collective import ALL_REDUCE, BROADCAST, PLACE
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation, Registry


def _same_rotation(s: Any) -> str | None:
    q, k = s.q, s.k
    same = (q.style, q.head_dim, q.n_rot, q.magnitude) == (k.style, k.head_dim, k.n_rot, k.magnitude)
    return None if same else f"query and key must rotate alike, got {q} and {k}"


REGISTRY = Registry(
    "cpu",
    [
        Implementation(EMBEDDING, "dequantise rows", t.embedding_op),
        Implementation(GATHER_ROWS, "copy rows", t.gather_rows),
        Implementation(NORM, "vector norm", t.norm_op),
        Implementation(LINEAR, "packed dot", t.linear),
        Implementation(LINEAR_ADD, "packed dot + residual", t.linear_add),
        Implementation(NORM_LINEAR, "norm, round, packed dots", t.norm_linear),
        Implementation(NORM_GATE_UP, "norm, round, packed dots, gate", t.norm_gate_up),
        Implementation(GATED, "vector gate", t.gated),
        Implementation(ADD, "vector add", t.add),
        Implementation(CAP, "vector cap", t.cap),
        Implementation(ROPE, "vector rope", t.rope),
        Implementation(KV_APPEND, "paged append", t.kv_append),
        Implementation(ROPE_APPEND, "rope + paged append", t.rope_append, _same_rotation),
        Implementation(ATTENTION, "paged flash", t.attention),
        Implementation(SAMPLE, "radix select", t.sample_op),
        Implementation(LOGPROBS, "short list", t.logprobs_op),
        Implementation(PLAIN, "vector function", t.plain),
        Implementation(ADD_ROW, "vector add", t.add_row),
        Implementation(MEAN_ROWS, "vector sums", t.mean_rows),
        Implementation(ENCODE, "flash", t.encode),
        Implementation(ROUTE, "float64 choice", lower_experts.route),
        Implementation(EXPERT_UP, "packed dots by expert", lower_experts.expert_up),
        Implementation(EXPERT_DOWN, "packed dots by expert", lower_experts.expert_down),
        Implementation(CHOSEN_LINEAR, "float dots by adapter", lower_experts.chosen_linear),
        Implementation(CONV, "vector convolution", lower_recurrent.conv),
        Implementation(SCAN2, "sequential scan", lower_recurrent.scan2),
        Implementation(SCAN1, "sequential scan", lower_recurrent.scan1),
        Implementation(GATED_NORM, "vector norm", lower_recurrent.gated_norm),
        Implementation(ALL_REDUCE, "the group's", collective.all_reduce),
        Implementation(PLACE, "copy columns", collective.place),
        Implementation(BROADCAST, "the group's", collective.broadcast),
    ],
)


def reads_rounded(packs: Callable[[Any], bool], node: Node, position: int) -> bool:
    """Whether a node reads the operand at `position` rounded to 8 bits."""
    if node.op is LINEAR:
        return position == 0 and packs(node.spec)
    if node.op is LINEAR_ADD:
        return position == 1 and packs(node.spec.linear)
    if node.op is EXPERT_UP or node.op is EXPERT_DOWN:
        return position == 0 and packs(node.spec)
    return False
