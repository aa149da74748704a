"""The one class that our Metal text goes through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quarrel import mlx_backend
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


def test_loops_over_registers_are_unrolled() -> None:
    """Arrays that a loop indexes lie in memory, not in registers, unless the loop is unrolled: every loop of a constant
    count is marked, but for those over what lies in memory anyway."""
    loop = re.compile(r"^(?!.*UNROLL).*for \(\w+ (\w+) = 0; \1 < (?!USED|GROUPS_USED|TOP)[A-Z0-9][A-Z_0-9 */]*; \1\+\+")
    package = Path(mlx_backend.__file__).parent
    lines = [(file.name, line.strip()) for file in package.rglob("*.py") for line in file.read_text().splitlines()]
    found = [(file, line) for file, line in lines if loop.match(line)]
    assert found == [], "write UNROLL before them"


def test_no_kernel_has_a_word_of_metals_for_a_parameter() -> None:
    package = Path(mlx_backend.__file__).parent
    for file in package.rglob("*.py"):
        for names in re.findall(r"Kernel\(\s*\"\w+\",\s*\(([^)]*)\)", file.read_text()):
            assert "uniform" not in re.findall(r"\w+", names), file.name
