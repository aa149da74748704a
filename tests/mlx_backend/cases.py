"""Running an op on this backend, on Metal or on the emulator, and comparing by the contract's own measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from quarrel.mlx_backend.backend import MlxBackend, create
from quarrel.ops import reference
from quarrel.ops.compare import errors
from quarrel.ops.contract import Array, Concrete, KVArrays, Op
from quarrel.ops.step import ComputeChoice
from tests.mlx_backend.emulated import CHECKED, installed
from tools.metal_emulator import Settings

UNTYPED = replace(CHECKED, typecheck=False)
"""For types of numbers other than the one whose kernels were type-checked: address spaces are the same."""


@contextmanager
def running(settings: Settings = UNTYPED) -> Iterator[MlxBackend]:
    """The backend, under these settings where kernels are emulated."""
    if mx.metal.is_available():
        yield create()
        return
    with installed(settings):
        yield create()


def error_on(backend: MlxBackend, op: Op, spec: Any, inputs: tuple[Concrete, ...], compute: ComputeChoice) -> float:
    """The largest relative error among the results on given inputs."""
    return max(errors(op, spec, backend.run_op(op, spec, inputs, compute), reference.run_op(op, spec, inputs)).values())


def arrays(results: tuple[Concrete, ...]) -> list[Array]:
    """Every array of an op's results."""
    flat: list[Array] = []
    for r in results:
        flat += [r.k, r.v] if isinstance(r, KVArrays) else [np.asarray(r)]
    return flat


def same_bits(a: tuple[Concrete, ...], b: tuple[Concrete, ...]) -> bool:
    """Whether two runs gave the same to the last bit."""
    return all(x.tobytes() == y.tobytes() for x, y in zip(arrays(a), arrays(b), strict=True))
