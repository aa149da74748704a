"""What travels between a process and its child: frames of bytes behind their length, mostly JSON, and errors by name."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from quarrel import errors
from quarrel.errors import QuarrelError, QueueFull

Json = Any
_LENGTH = 4
"""Bytes of a frame's length, big endian."""
_READ_SIZE = 1 << 20
_MAX_MESSAGES = 512
"""In one frame."""


class Link:
    """One end of a connection. Any thread may send; one thread reads. A deadline is a time of `time.monotonic`."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, body: bytes, deadline: float | None = None) -> None:
        """Sends a frame. Raises OSError when the other side is gone, TimeoutError (one of those) at the deadline."""
        with self._sending:
            self._limit(deadline)
            self._end.sendall(len(body).to_bytes(_LENGTH, "big") + body)

    def receive(self, deadline: float | None = None, max_bytes: int | None = None) -> bytes | None:
        """The next frame; None when the other side is gone.

        Raises TimeoutError at the deadline, OverflowError for a frame of more than `max_bytes`.
        """
        head = self._exactly(_LENGTH, deadline)
        if head is None:
            return None
        size = int.from_bytes(head, "big")
        if max_bytes is not None and size > max_bytes:
            raise OverflowError(f"a frame of {size} bytes, wanted at most {max_bytes}")
        return self._exactly(size, deadline)

    def cut(self) -> None:
        """Ends both directions at once: whoever reads or writes, here or there, notices."""
        with contextlib.suppress(OSError):  # the other side was faster
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the socket back; another process that inherited it keeps its own."""
        self._end.close()

    def _limit(self, deadline: float | None) -> None:
        if deadline is not None:
            # 0 would mean: do not wait at all, and fail with another error.
            self._end.settimeout(max(1e-6, deadline - time.monotonic()))

    def _exactly(self, size: int, deadline: float | None) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                self._limit(deadline)
                part = self._end.recv(min(size - len(data), _READ_SIZE))
            except TimeoutError:
                raise
            except OSError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)


class Wire:
    """Messages over a link. A message is a list, whose first entry says what it is; a frame is a JSON list of messages.

    Anything may `send`, at any time and from any thread, also a finaliser; one thread reads.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._queue: queue.SimpleQueue[list[list[Json]] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="quarrel-wire", daemon=True)
        self._writer.start()

    def send(self, *message: Json) -> None:
        """Queues a message. What is queued while a frame is being sent goes together in the next one."""
        self._queue.put([list(message)])

    def send_all(self, messages: list[list[Json]]) -> None:
        """Queues several, for one frame."""
        self._queue.put(messages)

    def frames(self) -> Iterator[list[list[Json]]]:
        """Until the other side is gone."""
        while (body := self._link.receive()) is not None:
            yield json.loads(body)

    def flush(self, timeout: float) -> None:
        """Waits until all that was queued is sent. Nothing may be sent afterwards."""
        self._queue.put(None)
        self._writer.join(timeout)

    def cut(self) -> None:
        """Ends both directions, at once."""
        self._queue.put(None)
        self._link.cut()

    def close(self) -> None:
        """Likewise, and gives the socket back."""
        self.cut()
        self._writer.join()
        self._link.close()

    def _write(self) -> None:
        last = False
        while not last:
            frame: list[list[Json]] = []
            while not last and (not frame or (len(frame) < _MAX_MESSAGES and not self._queue.empty())):
                messages = self._queue.get()
                last = messages is None
                frame += messages or ()
            try:
                self._link.send(json.dumps(frame, separators=(",", ":")).encode())
            except OSError:
                return  # the reader notices
            except BaseException:
                self._link.cut()
                raise


def pack_error(error: BaseException) -> Json:
    """An error by name: its text, when to try again if it says so, and the options that it names."""
    after, fields = getattr(error, "retry_after", None), list(getattr(error, "fields", ()))
    return [type(error).__name__, str(error) or repr(error), after, fields]


def unpack_error(data: Json) -> QuarrelError:
    """The error that it was. One of another kind, or of a kind that is made of more than a sentence, becomes the base."""
    name, text, retry_after, fields = data
    kind = error_kind(name)
    return QueueFull(text, retry_after) if kind is QueueFull else (kind or QuarrelError)(text, *fields)


def error_kind(name: str) -> type[QuarrelError] | None:
    """The class in `quarrel.errors` that is made of one sentence, or `QueueFull`; None for any other name."""
    kind = getattr(errors, name, None)
    known = isinstance(kind, type) and issubclass(kind, QuarrelError) and kind is not errors.UnsupportedOp
    return kind if known else None
