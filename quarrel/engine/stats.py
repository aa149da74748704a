"""What happened, in plain numbers that only grow: cheap enough to be always on. `quarrel/metrics.py` gives them names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quarrel.ops.profile import Profiled

LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PARTS = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Histogram:
    """Counts by upper bound, and the sum. One thread writes; readers may see a sum that is one value ahead."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


def _latency() -> Histogram:
    return Histogram(LATENCY)


def _part() -> Histogram:
    return Histogram(PARTS)


@dataclass
class Stats:
    """Written by the engine's thread alone."""

    steps: int = 0
    prompt_tokens: int = 0
    """That ran."""
    known_tokens: int = 0
    """Of prompts, that were in the cache already."""
    drawn_tokens: int = 0
    guessed_tokens: int = 0
    right_tokens: int = 0
    """Of the guessed ones."""
    guesses: int = 0
    """Steps of a sequence in which some were verified."""
    drafted_tokens: int = 0
    """Of the guessed ones, by a draft model; and those of them that were right."""
    drafted_right: int = 0
    faults: int = 0
    restarts: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """Requests by finish reason; failures by the name of their type."""
    prefill_seconds: float = 0.0
    """In steps that ran a part of a prompt; the rest is decoding."""
    decode_seconds: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    """Tokens that steps without a prompt ran, one for each of their sequences and each guess."""
    step_seconds: Histogram = field(default_factory=_latency)
    batch_sequences: Histogram = field(default_factory=lambda: Histogram(SIZES))
    batch_tokens: Histogram = field(default_factory=lambda: Histogram(SIZES))
    queue_seconds: Histogram = field(default_factory=_latency)
    first_token_seconds: Histogram = field(default_factory=_latency)
    token_seconds: Histogram = field(default_factory=_latency)
    """Between two tokens of a request."""
    request_seconds: Histogram = field(default_factory=_latency)
    moe_layer_seconds: Histogram = field(default_factory=_part)
    """Of each layer with experts in each step that was timed; routing is a part of it."""
    moe_routing_seconds: Histogram = field(default_factory=_part)
    ssm_scan_seconds: Histogram = field(default_factory=_part)
    ssm_conv_seconds: Histogram = field(default_factory=_part)
    diverged_states: int = 0
    """Sequences that ended as `Diverged` with a recurrent state that was not finite."""
    end_interval: float = 0.0
    """Seconds between two ends of requests while there were any, a running average."""
    last_end: float = 0.0

    def timed(self, profiled: Profiled) -> None:
        """A step was timed."""
        for histogram, phases in (
            (self.moe_layer_seconds, ("routing", "experts")),
            (self.moe_routing_seconds, ("routing",)),
            (self.ssm_scan_seconds, ("scan",)),
            (self.ssm_conv_seconds, ("convolution",)),
        ):
            for seconds in profiled.by_layer(*phases).values():
                histogram.add(seconds)

    def ended(self, now: float, submitted: float) -> None:
        """A request ended; where nothing ran before it, its own time is the interval."""
        interval = min(now - max(self.last_end, submitted), 60.0)
        self.end_interval += (0.1 if self.end_interval else 1.0) * (interval - self.end_interval)
        self.last_end = now
