"""Every Metal text that the contracts' cases make, whole as MLX compiles it, for Apple's own compiler: no GPU is needed.

    python -m tools.metal_dump DIR && sh DIR/compile.sh     # the second on a Mac with Xcode

DIR gets a file a text, named after the kernel and the text's hash, and `compile.sh`, which compiles all of them with the
flags of MLX's own builds, prints what the compiler says and fails if it refuses one. Nothing is run: outputs are zeros.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from quarrel.errors import UnsupportedOp
from quarrel.mlx_backend.registry import REGISTRY
from quarrel.mlx_backend.run_op import run_op
from quarrel.mlx_backend.runtime.launch import Batch, Rows
from tools.metal_emulator import Call, metal_kernel
from tools.metal_texts import cases

PRELUDE = '#include "mlx/backend/metal/kernels/utils.h"\n'
"""What MLX puts before a text when it compiles one at run time."""

COMPILE = """#!/bin/sh
# Compiles every text beside this file with Apple's compiler; MLX's headers come from its wheel.
cd "$(dirname "$0")" || exit 1
include=$(python3 -c 'import importlib.util as u; print(u.find_spec("mlx").submodule_search_locations[0] + "/include")')
bad=0
for text in *.metal; do
  xcrun -sdk macosx metal -c -Wall -Wextra -Wno-unused -fno-fast-math -I "$include" "$text" -o /dev/null || {
    echo "refused: $text"
    bad=$((bad + 1))
  }
done
echo "$(ls ./*.metal | wc -l) texts, $bad refused"
[ "$bad" = 0 ]
"""


class Dumper(metal_kernel):
    """Stands in for `mx.fast.metal_kernel`: writes the text of a call into `folder` and returns zeros."""

    folder: Path

    def __call__(
        self, *, inputs: Any, output_shapes: Any, output_dtypes: Any, grid: Any, threadgroup: Any, **rest: Any
    ) -> Any:
        call = Call(inputs, output_shapes, output_dtypes, grid, threadgroup, tuple(rest.get("template") or ()))
        text = self.text(call).text
        name = f"{self.name.rpartition('_')[0]}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.metal"
        (self.folder / name).write_text(PRELUDE + text)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes)]


def dump(folder: Path, only: str = "") -> int:
    """Writes the texts of ops whose name contains `only`; how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compile.sh").write_text(COMPILE)
    Dumper.folder = folder
    fast: Any = mx.fast
    maker, fast.metal_kernel = fast.metal_kernel, Dumper
    mx.disable_compile()
    try:
        for op, case, compute, single in cases():
            if only not in op.name:
                continue
            assert op.make is not None
            rows = Rows(np.full(case.dims.get("T", 0), single))
            batch = None if single is None else Batch(rows, rows)
            try:
                run_op(REGISTRY, op, case.spec, op.make(case, np.random.default_rng(0)), compute, batch)
            except UnsupportedOp:  # what the backend declines makes no text
                continue
    finally:
        fast.metal_kernel = maker
        mx.enable_compile()
    return len(list(folder.glob("*.metal")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    given = parser.parse_args()
    print(f"{dump(given.folder)} texts in {given.folder}; on a Mac: sh {given.folder}/compile.sh")


if __name__ == "__main__":
    main()
