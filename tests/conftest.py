"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A shell gives what it runs in the background SIGINT ignored, and children inherit that; Ctrl-C is tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine takes as long as it takes: no test fails by its time alone.
settings.register_profile("quarrel", deadline=None)
settings.load_profile("quarrel")

FIRST = (
    *("triton_backend/test_aot.py", "mlx_backend/test_models.py", "triton_backend/test_extra.py", "parallel/test_ray.py"),
    *("triton_backend/test_step.py", "models/test_reference_logits.py", "parallel/test_hosts.py", "server/test_process.py"),
    *("cpu_backend/test_portable.py", "tools/test_make_synthetic.py", "bench/test_check.py", "engine/test_simulation.py"),
)
"""Files of more than 35 seconds. One that comes last is waited for by the other processes."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: of 1983 seconds that two cores took, a fifth was waiting, for processes that
    start or are to miss a message, and for a clock."""
    return len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is collected stays. Looking for garbage among a gigabyte of modules and items, again and again, took 24 of 54
    seconds of collecting in each process, and parts of a second at a time later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # MLX's bindings report as leaked what is still there when Python ends


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        here = Path(__file__).parent
        rank = {here / name: i for i, name in enumerate(FIRST)}
        items.sort(key=lambda item: rank.get(item.path, len(rank)))
