"""Running an op on this backend and on its reference, and comparing by the contract's own measure."""

from __future__ import annotations

import os
from typing import Any

import torch

from quarrel.ops import reference
from quarrel.ops.compare import case_error, errors
from quarrel.ops.contract import Case, Compute, Concrete, Op
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.runtime.launch import INTERPRETED

EVERYTHING = os.environ.get("QUARREL_TEST_ALL") == "1" or not INTERPRETED
"""Every case in every arithmetic; without it each case runs in one, in turn, since the interpreter is slow."""

COMPUTES: tuple[Compute, ...] = ("float32", "float16") if INTERPRETED else ("float32", "float16", "bfloat16")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def error_of(backend: TritonBackend, op: Op, case: Case, compute: Compute, seed: int = 0) -> float:
    """Relative error of one case against the reference."""
    return case_error(backend, op, case, compute, seed)


def error_on(backend: TritonBackend, op: Op, spec: Any, inputs: tuple[Concrete, ...], compute: Compute) -> float:
    """The same on given inputs."""
    return max(errors(op, spec, backend.run_op(op, spec, inputs, compute), reference.run_op(op, spec, inputs)).values())
