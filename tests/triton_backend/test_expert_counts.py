"""Load statistics of experts, counted on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import route
from quarrel.triton_backend.runtime.launch import INTERPRETED, launch
from tests.expert_counts import check_counts


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's largest of nothing but NaN
@pytest.mark.parametrize("architecture", ["granitehybrid", "nemotron_h_moe"])
def test_every_choice_is_counted(backend: TritonBackend, architecture: str) -> None:
    check_counts(backend, architecture)


def test_rows_that_pad_a_batch_are_not_counted() -> None:
    device = "cpu" if INTERPRETED else "cuda"
    ids, counts = (torch.zeros(8 if d is torch.int32 else 5, dtype=d, device=device) for d in (torch.int32, torch.int64))
    weights, real_tokens = torch.zeros(8, device=device), torch.tensor([3], dtype=torch.int32, device=device)
    logits = torch.arange(20, dtype=torch.float32, device=device).remainder(7)
    shape = route.Shape(5, 2, "softmax", True, False, 1, 1, False)
    launch(
        route.route_rows, (1,), choice=route.Choice(ids, weights, counts), real_tokens=real_tokens, logits=logits,
        PDL=False, bias=logits, gains=logits, tokens=4, scale=1.0, S=shape, PADDED=True, G=1, E=8, R=4,
    )  # fmt: skip
    assert int(counts.sum()) == 6
    assert counts.tolist() == np.bincount(ids[:6].cpu().numpy(), minlength=5).tolist()
