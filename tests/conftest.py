"""What holds for every test."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A shell gives what it runs in the background SIGINT ignored, and children inherit that; Ctrl-C is tested here.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine takes as long as it takes: no test fails by its time alone.
settings.register_profile("quarrel", deadline=None)
settings.load_profile("quarrel")


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
