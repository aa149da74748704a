"""Starting a kernel: its grid, its options, and the report that it is compiled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import numpy as np
import triton

from quarrel.child.phase import compile_begins, compile_ends

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton decides when a kernel is defined, so this is read once, as the kernels are imported."""

Grid = tuple[int, ...]


class Launcher(Protocol):
    """Runs a kernel; the ahead-of-time compiler puts a recorder in this place."""

    def __call__(
        self,
        kernel: Any,
        grid: Grid,
        *args: Any,
        warps: int = 4,
        stages: int = 2,
        early: bool | None = None,
        **named: Any,
    ) -> None: ...


@cache
def options(warps: int, stages: int, early: bool | None = None) -> Mapping[str, Any]:
    """The compiler's options."""
    chosen = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return chosen | {"launch_pdl": True} if early else chosen


# The interpreter is NumPy, which warns where a GPU goes on: at infinities and in lanes that a mask throws away.
_without_warnings = np.errstate(all="ignore") if INTERPRETED else lambda function: function


@_without_warnings
def launch(
    kernel: Any, grid: Grid, *args: Any, warps: int = 4, stages: int = 2, early: bool | None = None, **named: Any
) -> None:
    """Runs `kernel` on the current stream; an empty grid is no work.

    early: whether it may start before the kernel ahead of it is over (programmatic dependent launch); such a kernel has a
    constant PDL, and if that is true each of its programs waits before it reads what the kernel ahead writes.
    """
    if not all(grid):
        return
    if early is not None:
        named["PDL"] = early
    # `kernel[grid]` calls this too, after one call more; the device waits for the launches of a prompt.
    kernel.run(*args, grid=grid, warmup=False, **named, **options(warps, stages, early))


def report_compiling() -> None:
    """Has Triton, which compiles kernels at their first launch, report that a thread compiles (`child/phase.py`).

    Its hooks are the process's: those of another program stay. They cost nothing once a kernel is compiled.
    """
    runtime = triton.knobs.runtime
    if runtime.jit_cache_hook is None and runtime.jit_post_compile_hook is None:
        runtime.jit_cache_hook = lambda **compilation: compile_begins()
        runtime.jit_post_compile_hook = lambda **compilation: compile_ends()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The next power of two, at least n."""
    return 1 << max(0, n - 1).bit_length()
