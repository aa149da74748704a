"""Whether a child makes progress: it reports its phase twice a second, and is ended after a long silence or step.

Loading and compiling take as long as they take, as does waiting for work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from quarrel.child.phase import Phase, PhaseClock

BEAT_SECONDS = 0.5


class Heart:
    """In the child: reports the phase of `clock`, which may be replaced, until the process ends."""

    def __init__(self, clock: PhaseClock, report: Callable[[Phase, float], None]) -> None:
        self.clock = clock
        self._report = report
        threading.Thread(target=self._beat, name="quarrel-heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            self._report(*self.clock.read())
            time.sleep(BEAT_SECONDS)


class Watch:
    """In the parent: calls `stuck` with the seconds, once, when a step or a silence lasts longer than `limit` seconds."""

    def __init__(self, limit: float, stuck: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._stuck, self._clock = stuck, clock
        self._progress = clock()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="quarrel-watch", daemon=True).start()

    def heard(self, phase: Phase, seconds: float) -> None:
        """A heartbeat: the child has been in this phase for so long."""
        self._progress = max(self._progress, self._clock() - (seconds if phase == "stepping" else 0.0))

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        last = self._clock()
        while not self._ended.wait(min(BEAT_SECONDS, self.limit / 4)):
            now = self._clock()
            # Where this process was stopped itself (Ctrl-Z), the child is not to blame.
            self._progress += max(0.0, now - last - 2 * BEAT_SECONDS)
            last = now
            if now - self._progress > self.limit:
                self._stuck(now - self._progress)
                return
