"""Log lines that leave a little later and together, for one of each request must not hold answers up; and lines of JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
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


class JSONLines(logging.Formatter):
    """Each record as one JSON object, a traceback with it. The access log's own fields stand beside the others."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        row: dict[str, object] = json.loads(message) if record.name == "quarrel.access" else {"message": message}
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return _row(record.created, record.levelname, record.name, row)


@contextlib.contextmanager
def json_stderr() -> Iterator[TextIO]:
    """What this process and those that it starts write to standard error becomes JSON, line by line, until the block ends.

    Yields the stream that it goes to, for what is JSON already.
    """
    sys.stderr.flush()
    with os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace", buffering=1) as stream:
        reading, writing = os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        thread = threading.Thread(target=_wrap, args=(reading, stream), name="quarrel-stderr", daemon=True)
        thread.start()
        try:
            yield stream
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os.dup2(stream.fileno(), 2)
            thread.join(2.0)  # a process that lives on keeps its end open


def _wrap(reading: int, stream: TextIO) -> None:
    with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if text := line.rstrip("\r\n"):
                with contextlib.suppress(OSError, ValueError):  # nobody reads it
                    stream.write(_row(time.time(), "WARNING", "stderr", {"message": text}) + "\n")


def _row(at: float, level: str, logger: str, fields: dict[str, object]) -> str:
    moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": moment, "level": level, "logger": logger, **fields})
