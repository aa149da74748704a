"""The seconds of each kernel of a step that runs as plain launches: an event behind each, read when the step is over."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from quarrel.ops.profile import Part, Phase, phases
from quarrel.ops.program import Node
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.launch import Grid
from quarrel.triton_backend.runtime.site import Batch

_KERNELS: Mapping[str, Phase] = {
    "norm_rows": "norm",
    "norm_int8x2_rows": "norm",
    "norm_add_int8x2": "norm",
    "post_norm_rows": "norm",
    "gated_norm_rows": "norm",
    "conv_rows": "convolution",
    "conv_state": "convolution",
}
"""Phases of kernels that do one part of a node."""

_AHEAD_CYCLES = 200_000
"""What the device waits for each node, some 100 us, so that the host, which needs 25 us a launch beside an H200, has queued
them all before the first one starts: else the time between two events would be the host's."""


class Clock(Protocol):
    """Marks points in the order of the device's work."""

    def start(self, nodes: int) -> None:
        """Before the first of so many nodes."""

    def mark(self) -> None:
        """Behind the work so far."""

    def seconds(self) -> list[float]:
        """Between each two marks; waits for the last."""


class EventClock:
    """CUDA events on the current stream."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def start(self, nodes: int) -> None:
        torch.cuda._sleep(nodes * _AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        self.mark()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        self._events[-1].synchronize()
        return [a.elapsed_time(b) * 1e-3 for a, b in zip(self._events, self._events[1:])]


class HostClock:
    """For CPU tensors, where a launch is over when it returns."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def start(self, nodes: int) -> None:
        self.mark()

    def mark(self) -> None:
        self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self._times, self._times[1:])]


class Stopwatch:
    """Runs a plan's launches and keeps which kernel each mark stands behind."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._marks = clock, list[tuple[int, str]]()

    def run(self, plan: Plan, marks: Sequence[bool], batch: Batch) -> None:
        """The launches of the marked nodes, in order."""
        plain = plan.launch
        node = 0

        def launch(kernel: Any, grid: Grid, *args: Any, **named: Any) -> None:
            plain(kernel, grid, *args, **named)
            self._mark(node, kernel.fn.__name__)

        self._clock.start(sum(marks))
        plan.launch = launch
        try:
            for node, (go, wanted) in enumerate(zip(plan.launches, marks, strict=True)):
                if wanted:
                    go(batch)
                    self._mark(node, "")
        finally:
            plan.launch = plain

    def _mark(self, node: int, kernel: str) -> None:
        self._clock.mark()
        self._marks.append((node, kernel))

    def read(self, nodes: Sequence[Node]) -> tuple[tuple[Part, ...], tuple[float, ...]]:
        """Parts in the order in which they ran, and their seconds; what a node does besides kernels has none."""
        named = phases(nodes)
        parts = tuple(
            Part(nodes[i].path, nodes[i].op.name, kernel, _KERNELS.get(kernel) or named[i]) for i, kernel in self._marks
        )
        return parts, tuple(self._clock.seconds())
