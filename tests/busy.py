"""A pytest plugin that makes tests slow, to find those that a busy machine could fail.

    python -m pytest -p tests.busy tests/engine tests/llm tests/server      (BUSY_SEED=2 for other lines)

One in ten lines of a test's own code, and of its helpers, waits a quarter of a second, until three seconds of each test are
spent. What the test started runs on meanwhile, as it does where the test's thread waits for a core.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

SHARE, PAUSE, MOST = 0.1, 0.25, 3.0
HERE = f"{Path(__file__).parent}{os.sep}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    chance = random.Random(f"{os.environ.get('BUSY_SEED', '1')} {item.nodeid}")
    left = MOST

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line" and left > 0 and chance.random() < SHARE:
            left -= PAUSE
            time.sleep(PAUSE)
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if left > 0 and frame.f_code.co_filename.startswith(HERE) else None

    sys.settrace(call)
    try:
        return (yield)
    finally:
        sys.settrace(None)
