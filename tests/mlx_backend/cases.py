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
from quarrel.ops.compare import errors, row_error
from quarrel.ops.contract import Array, Case, Compute, Concrete, KVArrays, Op
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


def error_of(op: Op, spec: Any, got: tuple[Concrete, ...], want: tuple[Concrete, ...], case: Case | None = None) -> float:
    """The largest relative error among the results and their rows."""
    return max(*errors(op, spec, got, want, case).values(), row_error(op, spec, got, want))


def error_on(backend: MlxBackend, op: Op, spec: Any, inputs: tuple[Concrete, ...], compute: ComputeChoice) -> float:
    """The same of an op on given inputs."""
    return error_of(op, spec, backend.run_op(op, spec, inputs, compute), reference.run_op(op, spec, inputs))


def check_case(backend: MlxBackend, op: Op, case: Case, compute: Compute) -> None:
    """Runs one case of a contract: no result, and no row of one, is further off than allowed."""
    assert op.make is not None
    inputs = op.make(case, np.random.default_rng(0))
    got, want = backend.run_op(op, case.spec, inputs, compute), reference.run_op(op, case.spec, inputs)
    assert len(got) == len(want)
    error, allowed = error_of(op, case.spec, got, want, case), op.tolerance[compute]
    assert error <= allowed, f"{op.name} is off by {error:.2e} (allowed {allowed:.0e}) for {case}"


def arrays(results: tuple[Concrete, ...]) -> list[Array]:
    """Every array of an op's results."""
    flat: list[Array] = []
    for r in results:
        flat += [r.k, r.v] if isinstance(r, KVArrays) else [np.asarray(r)]
    return flat


def same_bits(a: tuple[Concrete, ...], b: tuple[Concrete, ...]) -> bool:
    """Whether two runs gave the same to the last bit."""
    return all(x.tobytes() == y.tobytes() for x, y in zip(arrays(a), arrays(b), strict=True))
