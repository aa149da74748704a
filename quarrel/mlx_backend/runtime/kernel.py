"""One Metal kernel of ours: its text and how it is called, through `mx.fast.metal_kernel` and nothing else.

Whatever stands at `mx.fast.metal_kernel` when a kernel is called makes it: MLX's own function on a Mac, and off one
whatever a test has put in its place.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from quarrel.mlx_backend.runtime.metal import unrolled

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Kernel:
    """The body of a Metal function, named inputs and outputs, and the functions it uses (`header`).

    MLX writes the signature: an input is `const device T*` (`const constant T*` if it holds fewer than 8 values, so
    helpers take the pointer's type as a template parameter), an output `device T*`. `NAME_shape` and the thread attributes
    exist where the body names them. An input called `into_...` is written in place, through a cast that takes its const
    away: MLX does not know of it, so that its readers need another result of the kernel among their inputs. Shapes that
    vary from call to call are read from `NAME_shape`: a template constant means another compilation. `UNROLL` before a loop
    stands for the pragma.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str = ""

    def __call__(
        self,
        inputs: Sequence[mx.array],
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[mx.Dtype],
        groups: Sequence[int],
        threads: Sequence[int],
        template: Sequence[tuple[str, Any]] = (),
    ) -> list[mx.array]:
        """Runs `groups` threadgroups of `threads` each, both up to three numbers; no groups is no work, empty outputs."""
        groups, threads = _triple(groups), _triple(threads)
        if 0 in groups:
            return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        kernel = _made(self, mx.fast.metal_kernel)
        grid = tuple(g * t for g, t in zip(groups, threads))
        outputs: list[mx.array] = kernel(
            inputs=list(inputs),
            output_shapes=[tuple(s) for s in shapes],
            output_dtypes=list(dtypes),
            grid=grid,
            threadgroup=threads,
            template=list(template),
        )
        return outputs


@cache
def _made(kernel: Kernel, factory: Callable[..., Any]) -> Any:
    # MLX knows a compiled kernel by its name, and compiles again when the text under a name is another.
    digest = hashlib.sha256((kernel.source + kernel.header).encode()).hexdigest()[:8]
    return factory(
        name=f"{kernel.name}_{digest}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=unrolled(kernel.source),
        header=unrolled(kernel.header),
    )


def runs_metal() -> bool:
    """Whether calling a kernel can work: on Metal, or where another maker has been put in MLX's place."""
    return mx.metal.is_available() or type(mx.fast.metal_kernel) is not type(mx.fast.rms_norm)


def generation() -> int:
    """Of the GPU: 13 is M1's, 17 M5's; 0 where there is none, or its name says nothing."""
    found = re.match(r"applegpu_g(\d+)", str(mx.device_info().get("architecture", ""))) if not emulated() else None
    return int(found[1]) if found else 0


def emulated() -> bool:
    """Whether kernels are made by something that stands in for MLX's Metal; it needs values, so nothing is compiled."""
    return type(mx.fast.metal_kernel) is not type(mx.fast.rms_norm)


def _triple(sizes: Sequence[int]) -> Triple:
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return int(x), int(y), int(z)
