"""Batches on their way, and what the server says of them.

One thread writes and reads by turns. A stream that fails while it is read is ended by Arrow's reader, and gRPC ends the
process where another thread is in a write just then (call_op_set.h: "API misuse of type TOO_MANY_OPERATIONS").
"""

from __future__ import annotations

import time
from collections import deque
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
WINDOW = 8
"""Batches sent and not yet acknowledged; and those of one DoPut, after which its slow_down signals are read."""


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

    def read(self, reader: Any) -> None:
        """The results of a DoPut, to their end; Longbow sends one only to say that it is behind."""
        while (said := reader.read()) is not None:
            if parse_object(said.to_pybytes(), "put").get("status") == "slow_down":
                self.signals += 1


class Acks:
    """Counts acknowledged batches of an exchange, which are read when too many are outstanding, and at the end."""

    def __init__(self, reader: Any, notify: Callable[[int], None]) -> None:
        self.rows = 0
        self._reader, self._notify = reader, notify
        self._sent: deque[int] = deque()

    def before(self, rows: int) -> None:
        """Waits until a further batch of `rows` may be sent."""
        while len(self._sent) >= WINDOW:
            if not self._read():
                raise self._missing()
        self._sent.append(rows)

    def finish(self) -> None:
        """Waits for the rest; raises what the server, or the stream, ended with."""
        while self._read():
            pass
        if self._sent:
            raise self._missing()

    def _read(self) -> bool:
        """Whether the stream goes on."""
        try:
            chunk = self._reader.read_chunk()
        except StopIteration:
            return False
        if chunk.app_metadata is not None:
            self._take(parse_object(chunk.app_metadata.to_pybytes(), "exchange"))
        return True

    def _take(self, ack: dict[str, Any]) -> None:
        if ack.get("status") != "acked":
            raise FlightError(f"the server did not take a batch: {ack.get('reason') or ack.get('error') or ack}"[:300])
        if not self._sent:
            raise FlightDataError("the server acknowledged a batch that was never sent")
        rows = self._sent.popleft()
        self.rows += rows
        self._notify(rows)

    def _missing(self) -> FlightDataError:
        return FlightDataError(
            f"the server ended with {len(self._sent)} batches, {sum(self._sent)} rows, not acknowledged, wanted all"
            " acknowledged: send again"
        )


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


def abandon(writer: Any, reader: Any) -> None:
    """Ends an exchange that failed: both sides stop, and only the first fault is raised."""
    reader.cancel()
    with suppress(pa.ArrowException, OSError):
        writer.close()
