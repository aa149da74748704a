"""Batches on their way: one thread writes them, another listens to what the server says meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import flight

from quarrel.errors import FlightDataError, FlightError, RequestError
from quarrel.flight.messages import parse_object
from quarrel.flight.rows import first_line, validated

PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds to wait after a slow_down, doubled while they keep coming."""
WINDOW = 32
"""Batches sent and not yet acknowledged."""


@dataclass(frozen=True)
class Caps:
    """What is taken from a server at most; past any of them a stream is refused."""

    rows: int = 1 << 32
    nbytes: int = 64 << 30


class Pressure:
    """slow_down signals, and the pauses that they ask for."""

    def __init__(self) -> None:
        self.signals = 0
        self._seen, self._pause = 0, PAUSE

    def wait(self) -> None:
        """Sleeps if the server has reported pressure since the last call."""
        if self.signals == self._seen:
            self._pause = PAUSE
            return
        self._seen = self.signals
        time.sleep(self._pause)
        self._pause = min(LONGEST_PAUSE, self._pause * 2)


def listen_for_pressure(reader: Any, pressure: Pressure) -> threading.Thread:
    """Reads the results of a DoPut until they end; Longbow sends one only to say that it is behind."""

    def listen() -> None:
        try:
            while (said := reader.read()) is not None:
                if parse_object(said.to_pybytes(), "put").get("status") == "slow_down":
                    pressure.signals += 1
        except (pa.ArrowException, FlightError):
            return  # the writer meets the same fault, and tells it

    thread = threading.Thread(target=listen, name="quarrel-flight-put", daemon=True)
    thread.start()
    return thread


class Acks:
    """Counts acknowledged batches of an exchange, and holds the writer back when too many are not."""

    def __init__(self, reader: Any, notify: Callable[[int], None]) -> None:
        self.rows = 0
        self._reader, self._notify = reader, notify
        self._changed = threading.Condition()
        self._count = 0
        self._sent: list[int] = []
        self._error: BaseException | None = None
        self._over = False
        self._thread = threading.Thread(target=self._listen, name="quarrel-flight-acks", daemon=True)
        self._thread.start()

    def before(self, rows: int) -> None:
        """Waits until a further batch of `rows` may be sent."""
        with self._changed:
            while len(self._sent) - self._count >= WINDOW and not self._over:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            self._sent.append(rows)

    def finish(self) -> None:
        """Waits for the rest; raises what the server, or the stream, ended with."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._count < len(self._sent):
            raise FlightDataError(
                f"the server acknowledged {self._count} of {len(self._sent)} batches, wanted all: send again"
            )

    def _listen(self) -> None:
        try:
            while True:
                chunk = self._reader.read_chunk()
                if chunk.app_metadata is not None:
                    self._take(parse_object(chunk.app_metadata.to_pybytes(), "exchange"))
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _take(self, ack: dict[str, Any]) -> None:
        if ack.get("status") != "acked":
            raise FlightError(f"the server did not take a batch: {ack.get('reason') or ack.get('error') or ack}"[:300])
        with self._changed:
            if self._count >= len(self._sent):
                raise FlightDataError("the server acknowledged a batch that was never sent")
            rows = self._sent[self._count]
            self._count += 1
            self.rows += rows
            self._changed.notify_all()
        self._notify(rows)


def same_schema(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches, each with the first one's schema."""
    schema = None
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise RequestError(f"a {type(batch).__name__} is to be sent, wanted record batches: see vector_batch")
        schema = schema or batch.schema
        if not batch.schema.equals(schema):
            raise RequestError(f"a batch has other columns than the first: {_difference(schema, batch.schema)}")
        yield batch


def _difference(a: pa.Schema, b: pa.Schema) -> str:
    for name in dict.fromkeys((*a.names, *b.names)):
        left, right = (s.field(name).type if name in s.names else "none" for s in (a, b))
        if left != right:
            return f"{name} is {right}, wanted {left}"
    return "their order differs"


def checked(reader: Any, caps: Caps) -> Iterator[pa.RecordBatch]:
    """Batches of a stream, each checked in full; the stream is cancelled when it goes past the caps or is left early."""
    rows = nbytes = 0
    ended = False
    try:
        for chunk in reader:
            if chunk.data is None:
                continue
            batch = validated(chunk.data)
            rows, nbytes = rows + batch.num_rows, nbytes + batch.nbytes
            if rows > caps.rows or nbytes > caps.nbytes:
                raise FlightDataError(
                    f"the server sent {rows} rows in {nbytes} bytes, wanted at most {caps.rows} and {caps.nbytes}: ask for"
                    " less, or raise the caps"
                )
            yield batch
        ended = True
    finally:
        if not ended:
            reader.cancel()


def schema_of(reader: Any) -> pa.Schema:
    """The schema that begins a stream."""
    try:
        return reader.schema
    except pa.ArrowInvalid as error:
        raise FlightDataError(f"the server's stream begins with no schema: {first_line(error)}") from None


def descriptor(*path: str) -> flight.FlightDescriptor:
    return flight.FlightDescriptor.for_path(*path)


def close_put(writer: Any, listener: threading.Thread) -> None:
    """Ends a put whichever way it went, and raises what the server said of it."""
    try:
        writer.close()
    finally:
        listener.join()


def abandon(writer: Any, reader: Any) -> None:
    """Ends an exchange that failed: both sides stop, and only the first fault is raised."""
    reader.cancel()
    with suppress(pa.ArrowException, OSError):
        writer.close()
