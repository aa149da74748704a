"""Every launch of a Metal kernel that the contracts' cases make, by hash: two states of the code are compared with diff.

    python -m tools.metal_texts [--dump DIR] > before.txt

A line is a launch: the kernel's name, hashes of its text and of its inputs (packed weights among them), the grid and the
template constants. Nothing is executed: outputs are zeros. `--dump` writes each text once, as DIR/<hash>.metal.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from quarrel.errors import UnsupportedOp
from quarrel.mlx_backend.registry import REGISTRY
from quarrel.mlx_backend.run_op import run_op
from quarrel.mlx_backend.runtime.launch import Batch, Rows
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.contract import Case, Compute, Op

COMPUTES: tuple[Compute, ...] = ("float16", "bfloat16", "float32")


class Recorder:
    """Stands in for `mx.fast.metal_kernel`: prints what a launch is given and returns zeros."""

    dump: Path | None = None

    def __init__(
        self, name: str, input_names: list[str], output_names: list[str], source: str, header: str = "", **rest: Any
    ) -> None:
        text = "\n".join([" ".join(input_names), " ".join(output_names), header, source])
        self._name, self._hash = name.rpartition("_")[0], _hash(text.encode())
        if self.dump is not None:
            (self.dump / f"{self._hash}.metal").write_text(text)

    def __call__(
        self,
        inputs: list[mx.array],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
        grid: tuple[int, ...],
        threadgroup: tuple[int, ...],
        template: list[tuple[str, Any]],
    ) -> list[mx.array]:
        data = b"".join(f"{a.dtype} {a.shape}".encode() + _bytes(a) for a in inputs)
        constants = " ".join(f"{name}={value}" for name, value in template)
        print(
            "  ", self._name, self._hash, _hash(data), grid, threadgroup, constants, list(zip(output_shapes, output_dtypes))
        )
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes)]


def cases() -> Iterator[tuple[Op, Case, Compute, bool | None]]:
    """Op, case, arithmetic, and whether the rows are those of sequences that decode; None where the case says."""
    for op in {**ALL_OPS, **EXTRA_OPS}.values():
        for case in op.cases():
            if not case.dims.get("kv"):  # caches of codes are declined on Metal
                for compute in COMPUTES:
                    for single in (True, False) if "T" in case.dims and "S" not in case.dims else (None,):
                        yield op, case, compute, single


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", type=Path)
    Recorder.dump = parser.parse_args().dump
    if Recorder.dump is not None:
        Recorder.dump.mkdir(parents=True, exist_ok=True)
    fast: Any = mx.fast
    fast.metal_kernel = Recorder
    mx.disable_compile()
    for op, case, compute, single in cases():
        assert op.make is not None
        batch = None
        if single is not None:
            rows = Rows(np.full(case.dims["T"], single))
            batch = Batch(rows, rows)
        print(op.name, case.spec, dict(case.dims), compute, {True: "decode", False: "prefill", None: ""}[single])
        try:
            run_op(REGISTRY, op, case.spec, op.make(case, np.random.default_rng(0)), compute, batch)
        except UnsupportedOp as declined:
            print("  ", declined)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _bytes(array: mx.array) -> bytes:
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes() if array.size else b""


if __name__ == "__main__":
    main()
