"""Log lines that leave a little later and together: a line for each request must not hold answers up."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from typing import TextIO

EVERY = 0.1
"""Seconds between two writes."""
MOST = 100_000
"""Lines that are kept where nobody reads them; what comes then is only counted."""


class Later(logging.Handler):
    """Writes records from a thread of its own, so that a slow or stuck reader costs lines and no answer."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._records: deque[logging.LogRecord] = deque()
        self._lost = 0
        self._some, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._write, name="quarrel-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._records) >= MOST:
            self._lost += 1
            return
        self._records.append(record)
        if not self._some.is_set():
            self._some.set()

    def close(self) -> None:
        """What is kept is written, unless nobody reads it for a second."""
        self._over = True
        self._some.set()
        self._thread.join(1.0)
        super().close()

    def _write(self) -> None:
        over = False
        while not over:
            self._some.wait()
            if not self._over:
                time.sleep(EVERY)
            self._some.clear()
            over = self._over
            lines = [line for _ in range(len(self._records)) if (line := self._line(self._records.popleft())) is not None]
            lost, self._lost = self._lost, 0
            lines += [f"{lost} lines were lost: nobody read them"] if lost else []
            if lines:
                with contextlib.suppress(OSError, ValueError):  # the reader has gone
                    self._stream.write("\n".join(lines) + "\n")
                    self._stream.flush()

    def _line(self, record: logging.LogRecord) -> str | None:
        try:
            return self.format(record)
        except Exception:  # one that cannot be written must not end the others
            self.handleError(record)
            return None
