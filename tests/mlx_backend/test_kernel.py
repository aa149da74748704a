"""The one class that our Metal text goes through."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from quarrel.mlx_backend.linear.linear import build_linear
from quarrel.mlx_backend.registry import FAMILIES, REGISTRY
from quarrel.mlx_backend.runtime.kernel import Kernel, emulated, runs_metal
from tests.mlx_backend.cases import running
from tests.mlx_backend.emulated import CHECKED
from tools.metal_emulator import MetalFindings

DOUBLE = Kernel("double", ("x",), ("y",), "uint i = thread_position_in_grid.x;\ny[i] = x[i] + x[i];")


@pytest.fixture(name="_checked", autouse=True)
def _fixture() -> Iterator[None]:
    with running(CHECKED):
        yield


def test_a_call_runs_whole_threadgroups() -> None:
    x = mx.arange(64).astype(mx.float32)
    (y,) = DOUBLE([x], [(64,)], [mx.float32], (2,), (32,))
    assert np.array_equal(np.array(y), 2 * np.arange(64))


def test_no_groups_are_no_work() -> None:
    (y,) = DOUBLE([mx.zeros(64)], [(0, 3)], [mx.float16], (0, 2), (32,))
    assert y.shape == (0, 3)
    assert y.dtype == mx.float16


def test_kernels_of_one_name_are_told_apart_by_their_text() -> None:
    """MLX keeps a compiled kernel by name: two texts under one would be compiled in turn for ever."""
    x = mx.ones(32)
    thrice = Kernel(DOUBLE.name, DOUBLE.inputs, DOUBLE.outputs, DOUBLE.source.replace("x[i] +", "2 * x[i] +"))
    results = [kernel([x], [(32,)], [mx.float32], (1,), (32,))[0] for kernel in (DOUBLE, thrice, DOUBLE)]
    assert [float(np.array(y)[0]) for y in results] == [2.0, 3.0, 2.0]


@pytest.mark.skipif(mx.metal.is_available(), reason="a GPU reports nothing")
def test_what_the_emulator_finds_is_raised() -> None:
    assert emulated()
    assert runs_metal()
    with pytest.raises(MetalFindings, match="y"):
        DOUBLE([mx.ones(64)], [(32,)], [mx.float32], (2,), (32,))


def test_every_family_lists_its_implementations_once() -> None:
    listed = [i for family in FAMILIES for i in family.IMPLEMENTATIONS]
    assert len({(i.op.name, i.name) for i in listed}) == len(listed)
    assert build_linear in {i.build for i in listed}
    assert {"linear", "attention", "scan2", "expert_up", "sample"} <= set(REGISTRY.ops())
