"""The text around a kernel body is MLX's own, byte for byte, so an MLX that writes it otherwise shows here."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.metal_emulator.kernels import BLOCK_HEADER, MATVEC
from tools.metal_emulator import Call, metal_kernel

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

EVERYTHING = """
  uint i = thread_position_in_grid.x;
  if (i < uint(a_shape[0]) && a_ndim == 1) {
    o[i] = a[i * a_strides[0]] * s + c[0] + float(thread_index_in_simdgroup);
    p[0] = FLAG ? COUNT : 2;
  }
"""


@dataclass(frozen=True)
class Case:
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    source: str
    header: str = ""
    template: list[tuple[str, Any]] = field(default_factory=list)
    atomic: bool = False


def _vector(dtype: Any = mx.float32) -> Any:
    return mx.ones((64,), dtype)


def _matvec(dtype: Any, rows: int) -> Case:
    inputs = {"w": mx.zeros((4, 272), mx.uint8), "x": _vector(dtype)}
    return Case(inputs, {"y": dtype}, MATVEC, BLOCK_HEADER, [("T", dtype), ("ROWS", rows), ("GROUPS", 0)])


_TYPES = (mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int64, mx.uint64)
_ATOMIC = "atomic_fetch_add_explicit(&o[0], a[thread_position_in_grid.x], memory_order_relaxed);"
CASES = {
    "float": _matvec(mx.float32, 2),
    "half": _matvec(mx.float16, 4),
    "bfloat, negative": _matvec(mx.bfloat16, -1),
    "scalars, constants, shapes": Case(
        {"a": _vector(), "s": mx.array(2.0), "c": mx.array([1.0, 2.0])},
        {"o": mx.float32, "p": mx.int32},
        EVERYTHING,
        template=[("FLAG", True), ("COUNT", 3)],
    ),
    "atomic outputs": Case({"a": _vector(mx.int32)}, {"o": mx.int32, "n": mx.uint32}, _ATOMIC, atomic=True),
    "every type": Case(
        {f"x{i}": mx.zeros((64,), t) for i, t in enumerate(_TYPES)},
        {"o": mx.uint16},
        "o[grid_origin.x] = x1[threads_per_grid.x];",
    ),
    "no template": Case({"a": mx.zeros((2, 3, 8))}, {"o": mx.float32}, "o[0] = a[0] + a_shape[1] + a_strides[2] + a_ndim;"),
}


def captured(action: Callable[[], None]) -> str:
    """What an action writes to the standard output of the process, C++ included."""
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            action()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        return file.read().decode()


def arguments(case: Case) -> dict[str, Any]:
    return {
        "output_shapes": [(64,)] * len(case.outputs),
        "output_dtypes": list(case.outputs.values()),
        "grid": (64, 1, 1),
        "threadgroup": (64, 1, 1),
        "template": case.template,
    }


@pytest.mark.parametrize("name", CASES)
def test_same_text_as_mlx(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    names = list(case.inputs), list(case.outputs)
    theirs = mx.fast.metal_kernel("k", *names, case.source, case.header, atomic_outputs=case.atomic)

    # Only tracing lets MLX generate Metal text without a Metal device.
    def export() -> None:
        def traced(*inputs: Any) -> Any:
            return theirs(inputs=list(inputs), verbose=True, **arguments(case))

        mx.export_function(str(tmp_path / "f.mlxfn"), traced, *case.inputs.values())

    printed = captured(export)
    text = printed[printed.index("```\n") + 4 : printed.rindex("\n```")]
    ours = metal_kernel("k", *names, case.source, case.header, atomic_outputs=case.atomic)
    call = Call(list(case.inputs.values()), **arguments(case))
    assert ours.text(call).text.strip() == text.strip()
