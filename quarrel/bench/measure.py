"""Seconds of a test: steps launched one behind the other, as the engine does, the first run thrown away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from quarrel.bench.subject import Subject
from quarrel.bench.workload import Test
from quarrel.ops.step import Pending, StepInputs, Want


@dataclass(frozen=True)
class Samples:
    """Seconds of each repetition, and how long the first run took, with all that is done once."""

    seconds: tuple[float, ...]
    warm_up: float


def measure(subject: Subject, test: Test, rounds: int, until: float | None = None) -> Samples:
    """Runs a test once to warm up, then `rounds` times, or as often as fit before `until`, once at least."""
    if test.depth:
        run(subject, subject.layout.prefill(0, test.depth, test.batch))
    once = _prefill(subject, test) if test.kind == "prefill" else _decode(subject, test)
    began = time.perf_counter()
    once()
    warm_up = time.perf_counter() - began
    if warm_up > 1:
        # Compilation and graphs: what the first run of a bucket found out, the second one uses.
        once()
    seconds: list[float] = []
    while len(seconds) < rounds and not (seconds and until and time.perf_counter() + median(seconds) > until):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
    return Samples(tuple(seconds), warm_up)


def run(subject: Subject, steps: Iterable[StepInputs]) -> None:
    """Launches steps with one in flight and waits for the last."""
    want: Want = "hidden" if subject.source.encodes else "tokens"
    pending: Pending | None = None
    for inputs in steps:
        started = subject.step.launch(inputs, want)
        if pending is not None:
            pending.result()
        pending = started
    if pending is not None:
        pending.result()


def _prefill(subject: Subject, test: Test) -> Callable[[], None]:
    return lambda: run(subject, subject.layout.prefill(test.depth, test.tokens, test.batch))


def _decode(subject: Subject, test: Test) -> Callable[[], None]:
    layout = subject.layout

    def once() -> None:
        run(subject, (layout.decode(test.depth + i, test.batch, from_last=i > 0) for i in range(test.tokens)))

    return once
