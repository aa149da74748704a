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
Device.launcher_cls = staticmethod(lambda src, metadata: open("launchers", "a").write(src.name + "\\n"))
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
launchers = open("launchers").read().split()
print(len(made.compilers), len(hits) > 1, all(hits), len(launchers) == sum(len(c.seconds) for c in made.compilers))
again = ahead()
again.begin(limits)
print(len(again.compilers))
"""


SAME = """
from types import SimpleNamespace

from quarrel.gguf import GGMLType
from quarrel.ops.adjust import adjust
from quarrel.ops.contract import WeightRef
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import linear, linear_add, norm_gate_up
from quarrel.ops.norm import NormSpec
from quarrel.ops.null import Builder
from quarrel.ops.registry import lower
from quarrel.ops.sample import sample
from quarrel.ops.step import Limits
from quarrel.triton_backend.ahead import foreseen
from quarrel.triton_backend.backend import REGISTRY
from quarrel.triton_backend.formats.weights import META, Blank, blank, stored_as
from quarrel.triton_backend.linear import matvec, ring
from quarrel.triton_backend.runtime.compile import launch_nothing, uncompiled

CPU = torch.device("cpu")
torch.cuda.get_device_capability = lambda *device: (9, 0)
torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
for module in matvec, ring:
    module.multiprocessors = lambda device, found=module.multiprocessors: 132 if device == CPU else found(device)


class Zeros(Blank):
    def matrix(self, ref):
        made = self._packed.setdefault(ref, blank(stored_as(ref.type, self._compute), ref.rows, ref.k, CPU))
        for plane in made.planes:
            if plane is not None:
                plane.zero_()
        return made

    def vector(self, ref):
        return torch.zeros(ref.rows * ref.k)


b, (wide, far) = Builder(), (1024, 8192)
table = WeightRef("embd", GGMLType.Q6_K, 320, wide)
h = embedding(b, b.input("ids"), table)
gate, up = (WeightRef(n, GGMLType.Q4_K, far, wide) for n in ("gate", "up"))
gains = [WeightRef("gain", GGMLType.F32, 1, wide)]
y = norm_gate_up(b, NormSpec("rms", wide, 1e-5), h, gains, (gate, None), (up, None), "silu")
h = linear_add(b, h, y, WeightRef("down", GGMLType.Q4_K, wide, far))
logits = linear(b, gather_rows(b, h, b.input("out_rows")), table, out="f32")
program = b.program(tokens=sample(b, adjust(b, logits, b.input("ids"), b.input("out_rows"))))
choices, limits = lower(program, REGISTRY), Limits(128, 64, 4, 64)


def keys(weights, device):
    plan, _ = TritonBackend()._plan(program, choices, limits, "float16", False, weights, device, launch_nothing)
    return [set(uncompiled(lambda: [go(batch) for go in plan.launches])) for batch in foreseen(limits)]


listed, launched = keys(Blank("float16"), META), keys(Zeros("float16"), CPU)
print(sum(map(len, launched)) > 40, [len(a ^ b) for a, b in zip(listed, launched) if a != b])
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """By one process, as importing takes most of its time."""
    folder = tmp_path_factory.mktemp("kernels")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(folder)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", COMPILES.partition("entered = []")[0] + AHEAD + SAME]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kernels_of_every_step_and_what_starts_them_are_in_the_cache_before_it_is_launched(said: list[str]) -> None:
    assert said[:2] == ["1 True True True", "0"]


def test_a_plan_without_storage_lists_the_kernels_that_steps_launch(said: list[str]) -> None:
    """Cuts follow the number of multiprocessors: a prompt once waited for kernels with another number of parts."""
    assert said[2:] == ["True []"]


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


def test_names_within_a_constant_are_handed_on_as_constants() -> None:
    """Triton 3.6 hands a string that is a part of a record on as a string, which no kernel takes: a GPU met it."""
    folder = Path(__file__).parents[2] / "quarrel" / "triton_backend"
    strings = {"KIND", "FORMAT", "GATE"}
    found = [
        f"{path.name}:{node.lineno}"
        for path in folder.rglob("*.py")
        for kernel in ast.walk(ast.parse(path.read_text()))
        if isinstance(kernel, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in kernel.decorator_list)
        for node in ast.walk(kernel)
        if isinstance(node, ast.Call)
        if any(isinstance(arg, ast.Attribute) and arg.attr in strings for arg in node.args)
    ]
    assert not found
