"""Listens from the first moment on: /health says how far loading is, and who asks for more waits or is told to.

The sockets of those who ask for more once the model is there are handed to the server with all that they have sent.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress

HEAD = 64 << 10
DRAIN_SECONDS = 2.0
_LOADING = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
_OK = b'{"status":"ok"}'
_HEAD = b"HTTP/1.1 %s\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


class Early:
    """Answers on a listening socket, on a thread of its own, until `hand_over`."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self._loaded = False
        self._stop_reader, self._stop = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._waiting: list[socket.socket] = []
        self._open: set[socket.socket] = set()
        self._draining: dict[socket.socket, float] = {}
        self._thread = threading.Thread(target=self._run, name="early", daemon=True)

    def start(self) -> None:
        self.listener.setblocking(False)
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._selector.register(self._stop_reader, selectors.EVENT_READ)
        self._thread.start()

    def loaded(self) -> None:
        """From now on /health is 200."""
        self._loaded = True

    def hand_over(self) -> list[socket.socket]:
        """Ends the thread; the connections that want an answer. What has come since lies in the listener's queue."""
        self._stop.send(b"1")
        self._thread.join()
        self._selector.close()
        for one in (self._stop, self._stop_reader, *self._draining):
            one.close()
        return [*self._waiting, *self._open]

    def close(self) -> None:
        """Ends it all: nothing listens any more."""
        for one in (*self.hand_over(), self.listener):
            one.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0):
                if key.fileobj is self._stop_reader:
                    return
                if key.fileobj is self.listener:
                    self._accept()
                else:
                    self._look(key.fileobj)  # type: ignore[arg-type]
            now = time.monotonic()
            for one in [s for s, end in self._draining.items() if end < now]:
                self._close(one)

    def _accept(self) -> None:
        with suppress(OSError):
            made, _ = self.listener.accept()
            made.setblocking(False)
            self._open.add(made)
            self._selector.register(made, selectors.EVENT_READ)

    def _look(self, one: socket.socket) -> None:
        """Reads nothing of a request that is not answered here."""
        if one in self._draining:
            try:
                if not one.recv(HEAD):
                    self._close(one)
            except OSError:
                self._close(one)
            return
        try:
            seen = one.recv(HEAD, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            self._close(one)
            return
        if not seen:
            self._close(one)
        elif b"\r\n\r\n" not in seen and len(seen) < HEAD:
            time.sleep(0.005)  # the rest is on its way, and what is there is reported again
        elif seen.startswith((b"GET /health ", b"GET /v1/health ")) or not self._loaded:
            self._answer(one)
        else:
            self._selector.unregister(one)
            self._open.discard(one)
            self._waiting.append(one)

    def _answer(self, one: socket.socket) -> None:
        status, body = (b"200 OK", _OK) if self._loaded else (b"503 Service Unavailable", _LOADING)
        try:
            one.send(_HEAD % (status, len(body)) + body)
            one.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(one)
            return
        self._open.discard(one)
        self._draining[one] = time.monotonic() + DRAIN_SECONDS  # closed at once, what it still sends would undo the answer

    def _close(self, one: socket.socket) -> None:
        self._open.discard(one)
        self._draining.pop(one, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(one)
        one.close()
