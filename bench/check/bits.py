"""Whether the CPU's kernels give the same bits on another processor: every op's cases there, and here.

    python -m bench.check.bits --out FILE.npz [--ops linear,norm,...] [--cases 4] [--level NAME]      on each processor
    python -m bench.check.bits --compare FILE.npz OTHER.npz

Where there is no Arm: an aarch64 Python with numpy and llvmlite under `qemu-aarch64 -cpu max`, with `--level neon`: LLVM
finds no features there. An op whose results differ is named with its largest difference, over the RMS of the result.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path

import numpy as np

from bench.shared import command_line
from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.runtime import features
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.contract import KVArrays


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ops", default="")
    parser.add_argument("--cases", type=int, default=10**9, help="of each op, spread over all that it has")
    parser.add_argument("--level")
    parser.add_argument("--compare", type=Path, nargs=2)
    args = parser.parse_args()
    if args.compare:
        print(json.dumps(compared(*args.compare)))
        return 0
    level = features.LEVELS[args.level] if args.level else features.level()
    ops, began = {**ALL_OPS, **EXTRA_OPS}, time.perf_counter()
    found: dict[str, np.ndarray] = {}
    backend = CpuBackend(threads=1)
    backend._level = level
    for name in args.ops.split(",") if args.ops else sorted(ops):
        op = ops[name]
        cases = op.cases()
        for i in sorted({round(j) for j in np.linspace(0, len(cases) - 1, min(args.cases, len(cases)))}):
            assert op.make is not None
            inputs = op.make(cases[i], np.random.default_rng(i))
            for n, result in enumerate(backend.run_op(op, cases[i].spec, inputs)):
                arrays = (result.k, result.v) if isinstance(result, KVArrays) else (result,)
                found |= {f"{name} {i} {n} {part}": np.asarray(array) for part, array in enumerate(arrays)}
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        np.savez(args.out, level=f"{platform.machine()} {level.name}", **found)  # type: ignore[arg-type]
    return 0


def compared(left: Path, right: Path) -> dict[str, object]:
    """How many results are the same, and of which ops some are not."""
    a, b = np.load(left), np.load(right)
    names = sorted((set(a.files) & set(b.files)) - {"level"})
    apart: dict[str, float] = {}
    same = 0
    for name in names:
        if a[name].tobytes() == b[name].tobytes():
            same += 1
            continue
        x, y = (array[name].astype(np.float64) for array in (a, b))
        error = float(np.nanmax(np.abs(x - y)) / max(np.sqrt(np.nanmean(x**2)), 1e-30))
        op = name.split()[0]
        apart[op] = max(apart.get(op, 0.0), error)
    return {"levels": [str(a["level"]), str(b["level"])], "results": len(names), "same bits": same, "apart": apart}


if __name__ == "__main__":
    sys.exit(main())
