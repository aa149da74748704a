"""What vectors gain over plain loops on this CPU: softmax, SwiGLU and conversions of halves, by each feature level.

    python -m bench.ops.cpu_vectors --out FILE.json

A plain loop is the same formula, one value at a time, with the same instructions allowed, as a compiler emits it without
vectorising; halves are converted by integer arithmetic in it, as without F16C. Each is compared with NumPy before it is
timed, on values that lie in the first cache, on one thread; the fastest of many runs counts.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.shared import command_line
from quarrel.bench.machine import machine
from quarrel.cpu_backend.elementwise import silu
from quarrel.cpu_backend.runtime import features, jit
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.ir import F32, I16, Kernel, vec
from quarrel.cpu_backend.runtime.vector import exp, f16_to_f32, f32_to_f16, sum_lanes

COUNT, LANES = 2048, 16
Run = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
Emit = Callable[[Kernel, Level, int], None]
"""Writes a kernel of (x, y, n) that takes so many values at a time."""


def softmax(k: Kernel, level: Level, lanes: int) -> None:
    x, y, n = k.params
    type = vec(F32, lanes)
    top = k.var(k.lift(-3e38, type))
    with k.range(0, n, lanes) as i:
        top.v = k.maximum(k.load(x + (i << 2), type), top.v)
    most = top.v if lanes == 1 else top.v[0]
    for lane in range(1, lanes):
        most = k.maximum(most, top.v[lane])
    total = k.var(k.zero(type))
    with k.range(0, n, lanes) as i:
        e = exp(k, k.load(x + (i << 2), type) - k.lift(most, type))
        k.store(e, y + (i << 2))
        total.v = total.v + e
    inverse = 1.0 / (total.v if lanes == 1 else sum_lanes(total.v))
    with k.range(0, n, lanes) as i:
        k.store(k.load(y + (i << 2), type) * k.lift(inverse, type), y + (i << 2))


def swiglu(k: Kernel, level: Level, lanes: int) -> None:
    """The second half of x is `up`."""
    x, y, n = k.params
    type, half = vec(F32, lanes), n.ashr(1)
    with k.range(0, half, lanes) as i:
        gate, up = k.load(x + (i << 2), type), k.load(x + (half + i << 2), type)
        k.store(silu(k, gate) * up, y + (i << 2))


def from_half(k: Kernel, level: Level, lanes: int) -> None:
    x, y, n = k.params
    with k.range(0, n, lanes) as i:
        k.store(f16_to_f32(k, level, k.load(x + (i << 1), vec(I16, lanes))), y + (i << 2))


def to_half(k: Kernel, level: Level, lanes: int) -> None:
    x, y, n = k.params
    with k.range(0, n, lanes) as i:
        k.store(f32_to_f16(k, level, k.load(x + (i << 2), vec(F32, lanes))), y + (i << 1))


@dataclass(frozen=True)
class Subject:
    """A kernel with its inputs and what it must give."""

    name: str
    emit: Emit
    x: np.ndarray
    want: np.ndarray
    tolerance: float

    def kernel(self, level: Level, lanes: int) -> Any:
        def emit(k: Kernel) -> None:
            self.emit(k, level, lanes)
            k.finish()

        name = f"bench/{self.name}/{lanes}/{level.float16}"
        return Run(jit.address(name, emit, level))


def subjects() -> list[Subject]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(COUNT).astype(np.float32) * np.float32(3)
    e = np.exp(x.astype(np.float64) - x.max())
    gate, up = x[: COUNT // 2].astype(np.float64), x[COUNT // 2 :]
    half = x.astype(np.float16)
    return [
        Subject("softmax", softmax, x, (e / e.sum()).astype(np.float32), 1e-5),
        Subject("swiglu", swiglu, x, (gate / (1 + np.exp(-gate)) * up).astype(np.float32), 1e-5),
        Subject("float16 to float32", from_half, half, half.astype(np.float32), 0.0),
        Subject("float32 to float16", to_half, x, half, 0.0),
    ]


def measure(subject: Subject, level: Level, lanes: int, seconds: float) -> float:
    """Nanoseconds for each value, the fastest of the runs that fit into so many seconds; SystemExit if it is wrong."""
    run, out = subject.kernel(level, lanes), np.zeros_like(subject.want)
    at = int(subject.x.ctypes.data), int(out.ctypes.data), len(subject.x)
    run(*at)
    if not np.allclose(out.astype(np.float64), subject.want.astype(np.float64), rtol=subject.tolerance, atol=0):
        raise SystemExit(f"{subject.name} at {level.name}, {lanes} at a time, is wrong: nothing is timed")
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        for _ in range(20):
            run(*at)
        best = min(best, time.perf_counter() - began)
    return 1e9 * best / 20 / len(out)


def rows(levels: Sequence[Level], seconds: float) -> list[dict[str, Any]]:
    """A row for each kernel and level: nanoseconds for a value, and the gain over the plain loop."""
    found = []
    for subject in subjects():
        for level in levels:
            plain = measure(subject, replace(level, float16=False), 1, seconds)
            ours = measure(subject, level, LANES, seconds)
            row = {"kernel": subject.name, "level": level.name, "plain_ns": round(plain, 4), "vector_ns": round(ours, 4)}
            found.append(row | {"gain": round(plain / ours, 2)})
            print(f"{subject.name:20} {level.name:12} {plain:8.3f} ns plain {ours:8.3f} ns here, {plain / ours:5.1f} times")
    return found


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    args = parser.parse_args()
    levels = [level for level in features.levels() if level.name != "generic"] or list(features.levels())
    found = rows(levels, args.seconds)
    command = "python -m bench.ops.cpu_vectors --out FILE"
    args.out.write_text(json.dumps({"command": command, "machine": machine(), "rows": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
