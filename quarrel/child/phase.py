"""What the thread that runs a model is doing, and since when. A heartbeat reports it; only a step can take too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal["loading", "compiling", "stepping", "idle"]

_thread = threading.local()


class PhaseClock:
    """One thread enters phases; any thread reads the current one and its age."""

    def __init__(self, phase: Phase = "idle", clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = phase, clock()  # replaced as a whole, so that no reader sees half of a change

    def enter(self, phase: Phase) -> None:
        """The phase begins now, also where it is the one before."""
        self._now = phase, self._clock()

    def read(self) -> tuple[Phase, float]:
        """The phase and its age in seconds."""
        phase, since = self._now
        return phase, self._clock() - since

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Kernels are compiled or weights packed in the block; the phase around it begins anew afterwards."""
        before, _ = self._now
        self.enter("compiling")
        try:
            yield
        finally:
            self.enter(before)

    def follow_compiler(self) -> None:
        """Makes this the clock of the calling thread: `compile_begins` and `compile_ends` there set its phase."""
        _thread.clock = self


def compile_begins() -> None:
    """For a compiler that runs within a step, and does not know whose: the calling thread compiles a kernel from now on."""
    clock: PhaseClock | None = getattr(_thread, "clock", None)
    if clock is not None:
        clock.enter("compiling")


def compile_ends() -> None:
    """The calling thread's step goes on."""
    clock: PhaseClock | None = getattr(_thread, "clock", None)
    if clock is not None:
        clock.enter("stepping")
