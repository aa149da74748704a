"""Waiting for an index."""

from __future__ import annotations

import time
from collections.abc import Callable

from quarrel.errors import FlightUnavailable
from quarrel.flight.results import Readiness

POLL, LONGEST_POLL = 0.05, 1.0
SHORT = 30.0
"""Seconds that a dataset may be READY with too few rows indexed before it is said that no more will come."""


def until_ready(
    look: Callable[[], Readiness],
    name: str,
    rows: int,
    timeout: float,
    progress: Callable[[Readiness], None] | None,
    missing: Callable[[], object],
) -> Readiness:
    """The first look that finds a dataset ready with `rows` in its index; see `LongbowClient.wait_ready`. `missing` is
    called where the server says NOT_FOUND, and raises if that is true."""
    end, pause, short = time.monotonic() + timeout, POLL, 0.0
    while True:
        now = look()
        if progress is not None:
            progress(now)
        if now.status == "READY" and now.indexed >= rows:
            return now
        if now.status == "NOT_FOUND":
            missing()
        short = short + pause if now.status == "READY" else 0.0
        if time.monotonic() + pause > end or short > SHORT:
            waited = min(timeout, short) if short > SHORT else timeout
            raise FlightUnavailable(
                f"{name} is {now.status} with {now.indexed} rows indexed after {waited:.3g} s, wanted READY"
                f"{f' with {rows}' if rows else ''}: wait longer, or look at the server"
            )
        time.sleep(pause)
        pause = min(LONGEST_POLL, pause * 1.5)
