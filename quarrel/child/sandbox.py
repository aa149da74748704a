"""What scripts share that read what strangers made: their limits, and their frames on standard input and output.

`spawn_isolated` runs them. A frame is a length of four bytes, big endian, then the bytes.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys


def limit_cpu(seconds: float) -> None:
    """The kernel kills the process after so much of its own time, whatever runs in it, and however busy the machine; 0
    lifts that."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_resources(memory: int) -> None:
    """No file, no process, no core dump, and so many more bytes of memory. What a system does not know is passed over."""
    with contextlib.suppress(OSError):
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, used + memory)
    for name in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_NOFILE"):
        if hasattr(resource, name):
            _limit(getattr(resource, name), 0)


def received() -> bytes | None:
    """The next frame; None when there is no more."""
    size = sys.stdin.buffer.read(4)
    return sys.stdin.buffer.read(int.from_bytes(size, "big")) if len(size) == 4 else None


def send(data: bytes) -> None:
    """A frame to the parent."""
    sys.stdout.buffer.write(len(data).to_bytes(4, "big") + data)
    sys.stdout.buffer.flush()


def _limit(what: int, value: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(what, (value, value))
