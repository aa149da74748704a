"""Launches on an NVIDIA GPU find the kernel that was made for the text that Metal would get, or say that there is none."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from bench.check.mlx_cuda import Looked, OnCuda, failed, key_of
from quarrel.errors import RequestError
from quarrel.mlx_backend.runtime.kernel import Kernel
from tools.metal_emulator import Call, metal_kernel

DOUBLE = Kernel(
    "double", ("x", "few"), ("y",), "  if (int(thread_position_in_grid.x) < x_shape[1]) y[0] = T(x[0] * few[0]);\n"
)


def test_a_launch_finds_its_kernel_and_hands_over_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts: list[str] = []

    class Recorder(metal_kernel):
        def launch(self, call: Call, settings: Any) -> Any:
            texts.append(key_of(self.text(call)))
            return super().launch(call, settings)

    def run(maker: object) -> list[mx.array]:
        monkeypatch.setattr(mx.fast, "metal_kernel", maker)
        inputs = [mx.ones((2, 9)), mx.ones(3)]
        return DOUBLE(inputs, [(1,)], [mx.float16], (2, 3), (32,), [("T", mx.float16)])

    run(Recorder)
    monkeypatch.setattr(OnCuda, "folder", tmp_path)
    with pytest.raises(RequestError, match=r"has no PTX in .* prepare the folder again from this tree"):
        run(OnCuda)
    with pytest.raises(RequestError, match="has no PTX"):
        run(Looked)
    (tmp_path / f"{texts[0]}.z").write_bytes(zlib.compress(b"code"))
    given: dict[str, Any] = {}
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **all: given.update(all) or ["y"])
    assert run(OnCuda) == ["y"]
    assert (given["name"], given["compiled_source"], given["grid"]) == (texts[0], b"code", (64, 3, 1))
    assert [np.array(a).tolist() for a in given["inputs"][1:]] == [[2, 9], [1, 1, 1]]
    assert run(Looked)[0].shape == (1,)


def test_what_is_not_as_it_must_be_is_said() -> None:
    found = {
        "compute": "float32",
        "error_whole": 1e-6,
        "error_pieces": float("nan"),
        "same_in_flight": False,
        "cache_bytes": 800,
        "grown_bytes": 101,
    }
    assert failed(found, False) == [
        "error_pieces nan of 2e-05",
        "other tokens with steps in flight",
        "memory grew by 101 bytes",
    ]
    assert failed(found | {"error_pieces": 0.0, "same_in_flight": True}, True) == []
