"""Running an op on this backend and on its reference, and comparing by the contract's own measure."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from quarrel.ops import reference
from quarrel.ops.contract import Case, Compute, Concrete, KVArrays, Op, rel_error
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.runtime import INTERPRETED

EVERYTHING = os.environ.get("QUARREL_TEST_ALL") == "1" or not INTERPRETED
"""Every case in every arithmetic; without it each case runs in one, in turn, since the interpreter is slow."""

COMPUTES: tuple[Compute, ...] = ("float32", "float16") if INTERPRETED else ("float32", "float16", "bfloat16")


def worst(got: tuple[Concrete, ...], want: tuple[Concrete, ...]) -> float:
    """The largest relative error over all results; a cache counts as two."""
    errors = []
    for g, w in zip(got, want, strict=True):
        pairs = [(g.k, w.k), (g.v, w.v)] if isinstance(g, KVArrays) else [(g, w)]  # type: ignore[union-attr]
        errors += [rel_error(a, b) for a, b in pairs]  # type: ignore[arg-type]
    return max(errors)


def error_of(backend: TritonBackend, op: Op, case: Case, compute: Compute, seed: int = 0) -> float:
    """Relative error of one case against the reference."""
    assert op.make is not None
    return error_on(backend, op, case.spec, op.make(case, np.random.default_rng(seed)), compute)


def error_on(backend: TritonBackend, op: Op, spec: Any, inputs: tuple[Concrete, ...], compute: Compute) -> float:
    """The same on given inputs."""
    return worst(backend.run_op(op, spec, inputs, compute), reference.run_op(op, spec, inputs))
