"""What every fuzzer does: rounds of hypothesis with new seeds until the time is up, in the order of the seeds."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings


def examples(strategy: Any, count: int, number: int, check: Callable[[Any], None]) -> None:
    """`count` draws from `strategy`, the same for the same number; the first failure is shrunk and raised."""

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(strategy)
    def run(drawn: Any) -> None:
        check(drawn)

    run()


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every fuzzer takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def rounds(seconds: float, first: int, one: Callable[[int], None]) -> int:
    """Calls `one(seed)` with first, first + 1, ... until the time is up; the number of calls."""
    end, number = time.monotonic() + seconds, first
    while number == first or time.monotonic() < end:
        one(number)
        number += 1
    return number - first
