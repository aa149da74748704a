"""tools/triton_aot.py in a process of its own, which has Triton's compiler where the tests' has its interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.forked import Forked, forked

ROOT = Path(__file__).resolve().parents[1]
MAIN = "sys.exit(a.main(sys.argv[1:]))"
"""The tool's command line, as what a fork runs."""


@contextmanager
def compiler(folder: Path) -> Iterator[Forked]:
    """Its module is `a`. To import PyTorch and Triton takes 4.6 seconds, more than many a kernel."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    with forked("import sys, json; import tools.triton_aot as a", environment, folder) as process:
        yield process
