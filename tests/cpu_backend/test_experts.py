"""Experts in every block format."""

from __future__ import annotations

import pytest

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.gguf import GGMLType
from quarrel.ops.compare import check_case
from quarrel.ops.contract import Case
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.moe import EXPERT_DOWN, EXPERT_UP, ExpertDownSpec, ExpertUpSpec


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda t: t.name)
def test_experts_of_every_format(backend: CpuBackend, type: GGMLType) -> None:
    check_case(backend, EXPERT_UP, Case(ExpertUpSpec(type, 3, 2, 7, 256, "silu"), {"T": 3}), "float32")
    check_case(backend, EXPERT_DOWN, Case(ExpertDownSpec(type, 3, 2, 7, 256), {"T": 3}), "float32")
