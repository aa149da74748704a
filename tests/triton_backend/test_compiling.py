"""A kernel that is compiled within a step counts as compiling, not as a step that takes too long."""

from __future__ import annotations

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
    add_flat.warmup(*[MockTensor(torch.float32)] * 3, 1000, 1.0, BLOCK=256, grid=(4,))
print(*entered)
"""


def test_a_kernel_that_is_compiled_is_reported_once(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILES]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=240
    )
    assert done.stdout.split() == ["compiling", "stepping"], done.stderr
