"""Whether the other process gets on: it says so twice a second. One that does not, or is too long at a step, is ended."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from quarrel.llm import LLM
from quarrel.process.wire import Wire

BEAT_EVERY = 0.5
"""Seconds."""
PREPARES = {("triton.compiler.compiler", "compile"), ("quarrel.llm.loading", "compiled")}
"""Functions, by module, in which a step may stay for as long as it likes: kernels are compiled, weights packed."""
STEP_SECONDS = {"cpu": 1800.0}
"""By backend: on a few cores, a step of many rows of a large model takes minutes."""
STEP_SECONDS_ELSEWHERE = 300.0


class Beat:
    """Over there: tells how long the engine has been at one thing, not counting what prepares a step."""

    def __init__(self, wire: Wire) -> None:
        self.llm: LLM | None = None
        """None while it is loaded, which takes as long as it takes."""
        self._wire = wire
        self._prepared = 0.0
        threading.Thread(target=self._beat, name="quarrel-beat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            self._wire.send("beat", self._age())
            time.sleep(BEAT_EVERY)

    def _age(self) -> float:
        began = None if self.llm is None else self.llm.busy_since
        if self.llm is None or began is None:
            return 0.0
        now = time.perf_counter()
        if now - began > 2 * BEAT_EVERY and _is_in(self.llm.thread, PREPARES):
            self._prepared = now
        return now - max(began, self._prepared)


class Watch:
    """Over here: calls `stuck` with the seconds, once, where nothing has gone on for longer than `limit`."""

    def __init__(self, limit: float, stuck: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._stuck, self._clock = stuck, clock
        self._sound = clock()
        self._ended = threading.Event()
        threading.Thread(target=self._look, name="quarrel-watch", daemon=True).start()

    def heard(self, age: float) -> None:
        """A beat."""
        self._sound = max(self._sound, self._clock() - age)

    def end(self) -> None:
        self._ended.set()

    def _look(self) -> None:
        last = self._clock()
        while not self._ended.wait(min(BEAT_EVERY, self.limit / 4)):
            now = self._clock()
            # Where this process stood still itself (Ctrl-Z), the other one is not to blame.
            self._sound += max(0.0, now - last - 2 * BEAT_EVERY)
            last = now
            if now - self._sound > self.limit:
                self._stuck(now - self._sound)
                return


def _is_in(thread: int | None, functions: set[tuple[str, str]]) -> bool:
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None:
        if (str(frame.f_globals.get("__name__")), frame.f_code.co_name) in functions:
            return True
        frame = frame.f_back
    return False
