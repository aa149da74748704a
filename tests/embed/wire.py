"""A wire between a client and a server of this machine, which can be cut, held up and slowed."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: to close is to reset, as the system does for a process that was killed."""


class Wire:
    """Listens on `port` and passes everything on to `target`; a context manager."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._cut = False
        self._done = threading.Event()
        self._free = threading.Event()
        self._free.set()
        self._pause = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._free.set()
        self.cut()
        self._listener.close()

    def cut(self) -> None:
        """Resets every connection, and each new one at once."""
        with self._lock:
            self._cut = True
            for end in self._ends:
                _reset(end)
            self._ends = []

    def mend(self, target: int) -> None:
        with self._lock:
            self.target, self._cut = target, False

    def hold(self) -> None:
        """Nothing comes back any more, and nothing is closed."""
        self._free.clear()

    def drip(self) -> None:
        """A byte a second comes back."""
        self._pause = 1.0

    def flow(self) -> None:
        """All is well again, for new connections."""
        self._pause = 0.0
        self._free.set()
        self.cut()
        self.mend(self.target)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with self._lock:
                    server = None
                    if not self._cut:
                        with suppress(OSError):
                            server = socket.create_connection(("127.0.0.1", self.target))
                    if server is None:
                        _reset(client)
                        continue
                    self._ends += [client, server]
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, back: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while back and self._pause and data and not self._done.is_set():
                    to.sendall(data[:1])
                    data = data[1:]
                    self._done.wait(self._pause)
                if back:
                    self._free.wait()
                to.sendall(data)
        for end in (source, to):
            _reset(end)


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        end.shutdown(socket.SHUT_RDWR)
    end.close()
