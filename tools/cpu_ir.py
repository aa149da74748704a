"""Hashes the LLVM IR of every CPU kernel that the ops' cases need, at every feature level, without running any.

    python -m tools.cpu_ir > before.txt     (change something)     python -m tools.cpu_ir --against before.txt

A refactor leaves every line as it is. A kernel that only got another name shows as the same hash under that name.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from quarrel.cpu_backend.run_op import run_op
from quarrel.cpu_backend.runtime import jit
from quarrel.cpu_backend.runtime.abi import KernelDef
from quarrel.cpu_backend.runtime.features import LEVELS, Level
from quarrel.ops import ALL_OPS, EXTRA_OPS


def hashes(levels: list[str]) -> dict[str, str]:
    """`level kernel` -> the hash of its IR under a neutral name."""
    found: dict[str, str] = {}

    def record(kernel: KernelDef, level: Level) -> int:
        key = f"{level.name} {kernel.name}".replace("\n", " ")
        if key not in found:
            found[key] = hashlib.sha256(jit.emit_ir("kernel", kernel.emit).encode()).hexdigest()[:16]
        return 0

    KernelDef.address = record  # type: ignore[method-assign]
    pools: list[Any] = [
        SimpleNamespace(level=level, threads=2, run=lambda table: None) for level in map(LEVELS.get, levels)
    ]
    for op in {**ALL_OPS, **EXTRA_OPS}.values():
        assert op.make is not None
        for case in op.cases():
            inputs = op.make(case, np.random.default_rng(0))
            for pool in pools:
                run_op(op, case.spec, inputs, False, pool)
                run_op(op, case.spec, inputs, True, pool)
    return found


def compare(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[int, list[str], list[str]]:
    """How many kernels only changed their name, which have no equal any more, and which had none."""

    def unmatched(these: Mapping[str, str], those: Mapping[str, str]) -> list[str]:
        texts = {(key.split(" ")[0], digest) for key, digest in those.items()}
        return sorted(key for key, digest in these.items() if (key.split(" ")[0], digest) not in texts)

    lost = unmatched(before, now)
    changed = sum(now.get(key) != digest for key, digest in before.items())
    return changed - len(lost), lost, unmatched(now, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier output; prints only what differs")
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=list(LEVELS))
    args = parser.parse_args()
    now = hashes(args.levels)
    if args.against is None:
        print("\n".join(f"{digest} {key}" for key, digest in sorted(now.items())))
        return 0
    lines = (line.split(" ", 1) for line in args.against.read_text().splitlines())
    before = {key: digest for digest, key in lines if key.split(" ")[0] in args.levels}
    renamed, lost, new = compare(before, now)
    print(f"{len(before)} kernels before, {len(now)} now; {renamed} of the same hash have another name")
    for line in (*(f"- {key}" for key in lost), *(f"+ {key}" for key in new)):
        print(line)
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
