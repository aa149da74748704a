"""Load statistics of experts."""

from __future__ import annotations

import pytest

from quarrel.cpu_backend.backend import CpuBackend
from tests.expert_counts import check_counts


@pytest.mark.parametrize("architecture", ["granitehybrid", "nemotron_h_moe", "qwen3moe"])
def test_every_choice_is_counted(architecture: str) -> None:
    backend = CpuBackend(threads=2)
    check_counts(backend, architecture)
    backend.close()
