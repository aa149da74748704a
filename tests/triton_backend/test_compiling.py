"""A kernel that is compiled within a step counts as compiling, not as a step that takes too long."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")

COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor
import torch


class Device:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


driver.set_active(Device())
from quarrel.child import phase
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.elementwise.activation import add_flat

entered = []


class Clock(phase.PhaseClock):
    def enter(self, name):
        entered.append(name)


TritonBackend()
Clock("stepping").follow_compiler()
for _ in range(2):
    add_flat.warmup(*[MockTensor(torch.float32)] * 3, 1000, 1.0, BLOCK=256, PDL=False, grid=(4,))
print(*entered)
"""


def test_a_kernel_that_is_compiled_is_reported_once(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILES]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=240
    )
    assert done.stdout.split() == ["compiling", "stepping"], done.stderr


AHEAD = """
from triton import knobs

from quarrel.gguf import GGMLType
from quarrel.ops.contract import WeightRef
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.null import Builder
from quarrel.ops.registry import lower
from quarrel.ops.step import Limits
from quarrel.triton_backend.ahead import Ahead, foreseen
from quarrel.triton_backend.backend import REGISTRY
from quarrel.triton_backend.formats.weights import META, Blank
from quarrel.triton_backend.runtime.compile import launch_nothing
from quarrel.triton_backend.step import masks_of

torch.cuda.get_device_capability = lambda *device: (9, 0)
b = Builder()
h = embedding(b, b.input("ids"), WeightRef("embd", GGMLType.F16, 64, 32))
program = b.program(hidden=gather_rows(b, h, b.input("out_rows")))
choices, limits = lower(program, REGISTRY), Limits(64, 8, 4, 8)


def ahead():
    twin, _ = TritonBackend()._plan(program, choices, limits, "float16", False, Blank("float16"), META, launch_nothing)
    return Ahead(twin, masks_of(choices, program.outputs))


made = ahead()
made.begin(limits)
for batch in foreseen(limits):
    made.need(batch, "hidden")
hits = []
knobs.compilation.listener = lambda *, cache_hit, **rest: hits.append(cache_hit)
for batch in foreseen(limits):
    for go in made.twin.launches:
        go(batch)
print(len(made.compilers), len(hits) > 1, all(hits))
again = ahead()
again.begin(limits)
print(len(again.compilers))
"""


def test_kernels_of_every_step_are_in_the_cache_before_it_is_launched(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    prelude = COMPILES.partition("entered = []")[0]
    command = [sys.executable, "-c", prelude + AHEAD]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=240
    )
    assert done.stdout.splitlines() == ["1 True True", "0"], done.stdout + done.stderr


def test_loops_are_unrolled_over_named_constants() -> None:
    """Triton 3.6 takes a part of a constant for a value: a name with the annotation of a constant makes it one again."""
    folder = Path(__file__).parents[2] / "quarrel" / "triton_backend"
    found = [
        f"{path.name}:{node.lineno}"
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.static_range"
        if any(isinstance(part, ast.Attribute) for arg in node.args for part in ast.walk(arg))
    ]
    assert not found
