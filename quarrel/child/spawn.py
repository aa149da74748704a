"""Starts child processes, each with a link to its parent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quarrel.child.wire import Link

# The parent decides when a child ends, also where a terminal sends Ctrl-C to both.
_START = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv[1])
from {module} import main
main(int(sys.argv[2]))
"""
_PACKAGES = Path(__file__).parents[2]
"""Where this package is found, though the path that found it may be the current folder."""
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "TZ", "TMPDIR")
"""Of the environment, what Python itself needs."""
_KILL_SECONDS = 10.0
"""Until a killed process that a driver still holds is left alone."""


@dataclass(frozen=True)
class Child:
    """A process that `owner`, a process id, started. In a fork of that one it is nobody's: only the link is closed."""

    process: subprocess.Popen[bytes]
    link: Link
    owner: int

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def end(self, timeout: float = 0.0) -> int | None:
        """Waits so many seconds for its end and kills it then; its exit status, None where a driver holds it."""
        if self.owner != os.getpid():
            self.process.returncode = 0  # there is nothing to wait for, and Popen need not warn about it
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            if timeout:
                return self.process.wait(timeout)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(_KILL_SECONDS)
        return None


def spawn(module: str) -> Child:
    """A Python that calls `main(descriptor)` of this module; the descriptor is its socket, see `link_of`."""
    here, there = socket.socketpair()
    with there:
        return _child(here, _command(module, there), pass_fds=[there.fileno()], stdin=subprocess.DEVNULL)


def spawn_with(module: str, end: socket.socket) -> subprocess.Popen[bytes]:
    """Likewise, with a connection whose other end is elsewhere; `end` may be closed here."""
    return subprocess.Popen(_command(module, end), pass_fds=[end.fileno()], stdin=subprocess.DEVNULL)


def _command(module: str, end: socket.socket) -> list[str]:
    return [sys.executable, "-c", _START.format(module=module), json.dumps(sys.path), str(end.fileno())]


def link_of(descriptor: int) -> Link:
    """A child's end of its link."""
    return Link(socket.socket(fileno=descriptor))


def spawn_isolated(script: Path) -> Child:
    """A Python that runs this file alone, with frames on its standard input and output. It sees nothing of the
    environment, for keys and tokens are none of its business, and belongs to no terminal. Raises OSError."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), str(_PACKAGES)])
    here, there = socket.socketpair()
    with there:
        return _child(
            here,
            [sys.executable, "-S", "-s", "-P", "-B", str(script)],
            stdin=there,
            stdout=there,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )


def _child(here: socket.socket, command: list[str], **options: Any) -> Child:
    try:
        return Child(subprocess.Popen(command, **options), Link(here), os.getpid())
    except BaseException:
        here.close()
        raise
