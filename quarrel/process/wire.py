"""What goes between the two processes: frames of JSON, read by the types that are wanted and by nothing that they say.

A frame is four bytes of length and a JSON list of messages; a message is a list whose first entry says what it is.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import queue
import socket
import threading
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from quarrel import errors
from quarrel.engine import Chunk, Histogram, Result, TokenLogprob
from quarrel.errors import QuarrelError

T = TypeVar("T")
Json = Any
MOST = 512
"""Messages in one frame."""


class Wire:
    """One end of a connection. Anything may `send`, at any time and from any thread, also a finaliser; one thread reads."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("rb", buffering=1 << 16)
        self._out: queue.SimpleQueue[list[list[Json]] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="quarrel-wire", daemon=True)
        self._writer.start()

    def send(self, *message: Json) -> None:
        """Queues a message. What is queued while a frame is on its way goes together in the next one."""
        self._out.put([list(message)])

    def send_all(self, messages: list[list[Json]]) -> None:
        """Queues several, for one frame."""
        self._out.put(messages)

    def frames(self) -> Iterator[list[list[Json]]]:
        """Until the other side is gone."""
        while True:
            try:
                head = self._file.read(4)
                body = self._file.read(int.from_bytes(head, "big")) if len(head) == 4 else b""
            except (OSError, ValueError):  # ValueError: it was closed here
                return
            if len(head) < 4 or len(body) < int.from_bytes(head, "big"):
                return
            yield json.loads(body)

    def flush(self, timeout: float) -> None:
        """Waits until all that was queued is sent. Nothing may be sent afterwards."""
        self._out.put(None)
        self._writer.join(timeout)

    def cut(self) -> None:
        """Ends both directions, at once: whoever reads or writes learns of it."""
        self._out.put(None)
        with contextlib.suppress(OSError):  # the other side was faster
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Likewise, and gives the socket back."""
        self.cut()
        self._writer.join()
        self._file.close()
        self._end.close()

    def _write(self) -> None:
        last = False
        while not last:
            frame: list[list[Json]] = []
            while not last and (not frame or (len(frame) < MOST and not self._out.empty())):
                some = self._out.get()
                last = some is None
                frame += some or ()
            try:
                body = json.dumps(frame, separators=(",", ":")).encode()
                self._end.sendall(len(body).to_bytes(4, "big") + body)
            except OSError:
                return  # the reader learns of it
            except BaseException:
                self._end.shutdown(socket.SHUT_RDWR)
                raise


def plain(value: Any) -> Json:
    """A value as JSON holds it: dataclasses by field, arrays in base64, errors by name."""
    if isinstance(value, QuarrelError):
        return packed(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Histogram):
        return [list(value.bounds), list(value.counts), value.sum]
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return [little.dtype.str, list(value.shape), base64.b64encode(little.tobytes()).decode()]
    if isinstance(value, Mapping):
        # JSON's keys are texts: pairs keep theirs as they are. A copy, for the engine counts meanwhile.
        return [[plain(k), plain(v)] for k, v in dict(value).items()]
    if isinstance(value, list | tuple | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def typed(hint: type[T], data: Json) -> T:
    """What `plain` made of a value of that type. Only types that are in the hint are ever made."""
    return cast("T", _typed(hint, data))


def _typed(hint: Any, data: Json) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        some = [a for a in args if a is not type(None)]
        # Of several, the one that JSON tells apart by itself.
        return _typed(some[0], data) if len(some) == 1 else data
    if hint is QuarrelError:
        return unpacked(data)
    if dataclasses.is_dataclass(hint):
        hints = _hints(cast("type", hint))
        return cast("type", hint)(**{name: _typed(hints[name], value) for name, value in data.items()})
    if hint is Histogram:
        made = Histogram(tuple(data[0]))
        made.counts, made.sum = data[1], data[2]
        return made
    if hint is np.ndarray or origin is np.ndarray:
        return np.frombuffer(base64.b64decode(data[2]), np.dtype(data[0])).reshape(data[1])
    if origin is Counter:
        return Counter({_typed(args[0], k): v for k, v in data})
    if origin in (Mapping, dict):
        return {_typed(args[0], k): _typed(args[1], v) for k, v in data}
    if origin is tuple:
        inner = args[:1] * len(data) if len(args) == 2 and args[1] is Ellipsis else args
        return tuple(_typed(h, v) for h, v in zip(inner, data, strict=True))
    if origin is frozenset:
        return frozenset(data)
    if hint in (int, float, str, bool) or origin is Literal:
        return data
    raise TypeError(f"values of {hint} do not go between processes")


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def packed(error: QuarrelError) -> Json:
    """An error by name, its text, and when to try again if it says so."""
    return [type(error).__name__, str(error), getattr(error, "retry_after", None)]


def unpacked(data: Json) -> QuarrelError:
    """The error that it was; one of a kind that is made of more than a sentence comes back as its base."""
    name, text, after = data
    if name == "QueueFull":
        return errors.QueueFull(text, after)
    kind = getattr(errors, name, QuarrelError)
    if not (isinstance(kind, type) and issubclass(kind, QuarrelError)) or kind is errors.UnsupportedOp:
        kind = QuarrelError
    made: QuarrelError = kind(text)
    return made


def chunk_row(stream: int, chunk: Chunk) -> list[Json]:
    """A chunk as a message; most are a text and an id."""
    row: list[Json] = ["chunk", stream, chunk.index, chunk.text, chunk.token_id]
    if chunk.logprob is not None or chunk.result is not None:
        row += [plain(chunk.logprob), plain(chunk.result)]
    return row


def chunk_of(row: list[Json]) -> Chunk:
    """What `chunk_row` was made of."""
    _, _, index, text, token = row[:5]
    if len(row) == 5:
        return Chunk(text, token, index)
    logprob = None if row[5] is None else typed(TokenLogprob, row[5])
    return Chunk(text, token, index, logprob, None if row[6] is None else typed(Result, row[6]))
