"""Kernels of several rows: counts on both sides of every threshold, tiles that overhang, parts of K, decoded stacks."""

from __future__ import annotations

import pytest

from quarrel.gguf import GGMLType
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Case
from quarrel.ops.linear import LINEAR, LINEAR_ADD, LinearAddSpec, LinearSpec
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import grouped
from quarrel.triton_backend.linear import matmul
from tests.triton_backend.cases import error_of

OPS = {**ALL_OPS, **EXTRA_OPS}


@pytest.mark.parametrize(
    ("type", "n", "k", "tokens", "bias"),
    [
        (GGMLType.Q4_K, 200, 512, 5, True),
        (GGMLType.Q6_K, 70, 768, 20, False),
        (GGMLType.MXFP4, 33, 2880, 3, True),
        (GGMLType.F16, 64, 256, 40, False),
        (GGMLType.Q8_0, 130, 320, matmul.MOST, True),
        (GGMLType.Q8_0, 130, 320, matmul.MOST + 1, True),
        (GGMLType.F16, 65, 96, matmul.MOST + 1, False),
    ],
)
def test_linear_maps_of_several_tokens(
    backend: TritonBackend, type: GGMLType, n: int, k: int, tokens: int, bias: bool
) -> None:
    spec = LinearSpec(type, n, k, bias)
    assert error_of(backend, LINEAR, Case(spec, {"T": tokens}), "float16") <= LINEAR.tolerance["float16"]
    case = Case(LinearAddSpec(spec, 0.5), {"T": tokens})
    assert error_of(backend, LINEAR_ADD, case, "float16") <= LINEAR_ADD.tolerance["float16"]


def test_a_weight_in_pieces(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarrel.triton_backend.linear.dequant_matmul.PIECE", 64 * 512)
    case = Case(LinearSpec(GGMLType.Q4_K, 150, 512, True), {"T": matmul.MOST + 1})
    assert error_of(backend, LINEAR, case, "float16") <= LINEAR.tolerance["float16"]


@pytest.mark.parametrize(
    "case",
    [
        Case(AttentionSpec(8, 2, 64, 0.125, window=40), {"S": 2, "Q": 1, "KV": 300, "block_size": 32}, "windowed splits"),
        Case(AttentionSpec(8, 2, 64, 0.125, sinks=True, cap=10.0), {"S": 2, "Q": 1, "KV": 700, "block_size": 16}, "sinks"),
        Case(AttentionSpec(4, 2, 64, 0.125, window=100), {"S": 2, "Q": 150, "KV": 300, "block_size": 32}, "window's edge"),
    ],
    ids=lambda case: case.note,
)
def test_attention_over_many_tiles(backend: TritonBackend, case: Case) -> None:
    assert error_of(backend, ATTENTION, case, "float16") <= ATTENTION.tolerance["float16"]


@pytest.mark.parametrize("pieces", [False, True])
def test_experts_with_many_pairs_are_decoded_first(
    backend: TritonBackend, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pieces:  # one expert at a time
        monkeypatch.setattr(grouped, "PIECE", 1)
    for op, spec, dims in (
        ("expert_up", ExpertUpSpec(GGMLType.Q4_K, 3, 2, 140, 256, "silu"), {"T": 150}),
        ("expert_down", ExpertDownSpec(GGMLType.Q8_0, 3, 2, 140, 96, True), {"T": 150, "all_on": 1}),
    ):
        assert error_of(backend, OPS[op], Case(spec, dims), "float16") <= OPS[op].tolerance["float16"]
