"""What the backend refuses, each with one sentence: arguments outside the contract, and machines that cannot run it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quarrel.errors import BackendUnavailable, OutOfMemory, RequestError, UnsupportedOp
from quarrel.gguf import GGMLType
from quarrel.ops import ALL_OPS, draw
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.contract import Case, KVArrays, RawWeight
from quarrel.ops.embedding import EMBEDDING, EmbeddingSpec
from quarrel.ops.linear import ADD, LINEAR, AddSpec, LinearSpec
from quarrel.ops.step import Backend, Limits
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.runtime.launch import INTERPRETED
from tests.triton_backend.test_step import PROGRAM, Weights

SPEC = AddSpec(8)
ROW = np.ones((3, 8), np.float32)


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        (ROW[:, :7].copy(), ROW, r"add: a has shape \[3, 7\], wanted \[T, 8\]"),
        (ROW, ROW[:2].copy(), r"add: b has shape \[2, 8\], wanted \[3, 8\]"),
        (ROW.astype(np.float64), ROW, "contiguous float64, wanted contiguous float32"),
        (np.ones((3, 16), np.float32)[:, ::2], ROW, "strided float32"),
        (np.broadcast_to(ROW[:1], (3, 8)), ROW, "strided float32"),
        (ROW.T.copy().T, ROW, "strided float32"),
        (ROW.tolist(), ROW, "a is list, wanted an array"),
    ],
    ids=["width", "rows", "dtype", "strided", "expanded", "transposed", "list"],
)
def test_arrays_of_another_shape_type_or_layout(backend: TritonBackend, a: Any, b: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        backend.run_op(ADD, SPEC, (a, b))


def test_a_missing_argument(backend: TritonBackend) -> None:
    with pytest.raises(RequestError, match=r"add takes \['a', 'b'\], got 1 arguments"):
        backend.run_op(ADD, SPEC, (ROW,))


def test_weights_that_are_not_whole_rows(backend: TritonBackend) -> None:
    x = np.ones((1, 256), np.float32)
    weight = draw.weight(np.random.default_rng(0), GGMLType.Q4_K, 4, 256)
    spec = LinearSpec(GGMLType.Q4_K, 4, 256)
    with pytest.raises(RequestError, match="rows of 143 bytes for 256 values of Q4_K, wanted 144 bytes"):
        backend.run_op(LINEAR, spec, (x, replace(weight, raw=weight.raw[:, :143].copy())))
    with pytest.raises(RequestError, match="wanted raw blocks"):
        backend.run_op(LINEAR, spec, (x, RawWeight(GGMLType.Q4_K, weight.raw.astype(np.int8), 256)))
    with pytest.raises(RequestError, match="wanted raw weight rows"):
        backend.run_op(LINEAR, spec, (x, x))


@pytest.mark.parametrize("id", [-1, 19, 2**31 - 1])
def test_ids_outside_the_table(backend: TritonBackend, id: int) -> None:
    spec = EmbeddingSpec(GGMLType.F32, 19, 32)
    weight = draw.weight(np.random.default_rng(0), GGMLType.F32, 19, 32)
    with pytest.raises(RequestError, match=r"embedding: ids lies in .*, wanted 0..18"):
        backend.run_op(EMBEDDING, spec, (np.array([0, id], np.int32), weight))


@pytest.mark.parametrize(
    ("which", "value", "match"),
    [
        (3, np.full((1, 2), 99, np.int32), "block_table lies in 99..99"),
        (2, np.array([33], np.int32), "kv_len lies in 33..33"),
        (1, np.array([0, 2], np.int32), "query_start does not rise from 0 to 3"),
        (
            4,
            KVArrays(np.zeros((3, 16, 1, 64), np.float32), np.zeros((3, 16, 1, 64), np.float32)),
            r"the cache holds keys and values \[\[1, 64\], \[1, 64\]\]",
        ),
    ],
)
def test_addresses_outside_the_cache(backend: TritonBackend, which: int, value: Any, match: str) -> None:
    spec = AttentionSpec(4, 2, 64, 0.125)
    case = Case(spec, {"S": 1, "Q": 3, "KV": 20, "block_size": 16})
    inputs = list(ATTENTION.make(case, np.random.default_rng(0)))  # type: ignore[misc]
    inputs[which] = value
    with pytest.raises(RequestError, match=match):
        backend.run_op(ATTENTION, spec, inputs)


def test_a_head_wider_than_the_kernels(backend: TritonBackend) -> None:
    spec = AttentionSpec(1, 1, 1024, 0.05)
    inputs = ATTENTION.make(Case(spec, {"S": 1, "Q": 1, "KV": 0, "block_size": 16}), np.random.default_rng(0))  # type: ignore[misc]
    with pytest.raises(UnsupportedOp, match="needs head_dim up to 512, got 1024"):
        backend.run_op(ATTENTION, spec, inputs)


def test_an_activation_without_a_kernel(backend: TritonBackend) -> None:
    op = ALL_OPS["gated"]
    spec = op.spec("swish9", 8)
    with pytest.raises(UnsupportedOp, match="needs one of the activations silu, gelu_tanh, .*, got swish9"):
        backend.run_op(op, spec, (ROW, ROW))


def test_a_cache_larger_than_the_memory(backend: TritonBackend) -> None:
    with pytest.raises(OutOfMemory, match="use a smaller context or model"):
        backend.compile(PROGRAM, Weights(), Limits(8, 1, 1 << 28, 1 << 33), "float32")


def test_it_is_a_backend(backend: TritonBackend) -> None:
    assert isinstance(backend, Backend)
    assert backend.free_bytes() > 0
    assert "Triton" in backend.device()


@pytest.mark.skipif(not INTERPRETED, reason="a CUDA device computes bfloat16 rightly")
def test_the_interpreter_refuses_bfloat16(backend: TritonBackend) -> None:
    assert backend.compute_of("auto") == "float32"
    with pytest.raises(RequestError, match="bfloat16 is wrong in Triton's interpreter"):
        backend.run_op(ADD, SPEC, (ROW, ROW), "bfloat16")


@pytest.mark.skipif(not INTERPRETED, reason="the kernels were compiled for a CUDA device")
def test_an_interpreter_that_nobody_asked_for_is_unavailable(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendUnavailable, match="loaded for Triton's interpreter"):
        backend.run_op(ADD, SPEC, (ROW, ROW))


@pytest.mark.skipif(not INTERPRETED, reason="this machine has a CUDA device")
def test_a_machine_without_cuda_says_so_in_one_sentence() -> None:
    code = (
        "from quarrel.ops.registry import backend; b = backend('triton'); print(b.unavailable()); b.run_op(None, None, [])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "CUDA" in done.stdout
    assert done.stdout.count("\n") == 1
    assert "BackendUnavailable: the triton backend cannot run here" in done.stderr
