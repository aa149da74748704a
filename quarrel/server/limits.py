"""Token buckets: how fast each caller may go, in memory that callers cannot grow."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quarrel.server.errors import Refused
from quarrel.server.settings import Rates

MAX_CALLERS = 10_000
"""Callers remembered; the least recently seen is forgotten, which gives it a full bucket again."""


@dataclass
class _Bucket:
    """Holds up to `rate` (a minute's worth), and fills evenly."""

    rate: float
    level: float
    at: float

    def wait(self, cost: float, now: float) -> float:
        """Seconds until `cost` is there; 0 takes it."""
        self.level = min(self.rate, self.level + (now - self.at) * self.rate / 60)
        self.at = now
        # What costs more than a full bucket passes when the bucket is full, and leaves a debt.
        missing = min(cost, self.rate) - self.level
        if missing > 0:
            return missing * 60 / self.rate
        self.level -= cost
        return 0.0


class _Caller:
    def __init__(self, rates: Rates, now: float) -> None:
        self.streams = 0
        self.buckets = {
            kind: _Bucket(rate, rate, now)
            for kind in ("requests", "prompt_tokens", "output_tokens")
            if (rate := getattr(rates, kind))
        }


class Limiter:
    """Counts what each caller uses. For one event loop."""

    def __init__(self, rates: Rates, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates, self._clock = rates, clock
        self._callers: OrderedDict[str, _Caller] = OrderedDict()

    def __len__(self) -> int:
        return len(self._callers)

    def charge(self, caller: str, kind: str, cost: float) -> None:
        """Takes `cost` of a kind; raises `Refused` (429) that says when to come back."""
        bucket = self._caller(caller).buckets.get(kind)
        if bucket is None:
            return
        wait = bucket.wait(cost, self._clock())
        if wait:
            raise over(kind, bucket.rate, wait)

    def refund(self, caller: str, kind: str, amount: float) -> None:
        """Gives back what was charged and not used; a negative amount is taken without a question."""
        bucket = self._caller(caller).buckets.get(kind)
        if bucket is not None:
            bucket.level = min(bucket.rate, bucket.level + amount)

    @contextmanager
    def stream(self, caller: str) -> Iterator[None]:
        """Holds one of the caller's places for requests in flight."""
        entry = self._caller(caller)
        if self._rates.streams and entry.streams >= self._rates.streams:
            raise crowded(entry.streams, self._rates.streams)
        entry.streams += 1
        try:
            yield
        finally:
            entry.streams -= 1

    def _caller(self, name: str) -> _Caller:
        entry = self._callers.get(name)
        if entry is None:
            entry = self._callers[name] = _Caller(self._rates, self._clock())
            if len(self._callers) > MAX_CALLERS:
                self._forget()
        self._callers.move_to_end(name)
        return entry

    def _forget(self) -> None:
        for name, entry in self._callers.items():
            if not entry.streams:
                del self._callers[name]
                return


def over(kind: str, rate: float, wait: float) -> Refused:
    what = kind.replace("_", " ")
    message = f"over {rate:g} {what} a minute: try again in {wait:.1f} s"
    return Refused(429, "rate_limited", message, retry_after=wait)


def crowded(found: int, most: int) -> Refused:
    message = f"{found} requests are in flight already, of at most {most}: wait for one to end"
    return Refused(429, "rate_limited", message, retry_after=1.0)
