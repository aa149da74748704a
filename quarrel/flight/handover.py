"""Bytes that one process makes for another on request, in pieces of a stream: as a file that is read once."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from quarrel.errors import FlightDataError, QuarrelError
from quarrel.flight.connection import Access, Connection, Retry
from quarrel.flight.rows import first_line
from quarrel.flight.sockets import cut

PIECE = 16 << 20
"""Bytes of a message at most."""
POLL = 0.05
_SCHEMA = pa.schema([pa.field("piece", pa.large_binary(), nullable=False)])


class Port(flight.FlightServerBase):  # type: ignore[misc]
    """A Flight server that ends when it is to."""

    def end(self, grace: float) -> None:
        """Shuts it down. The library waits for the calls in flight, this not longer than `grace` seconds."""
        ending = threading.Thread(target=self.shutdown)
        ending.start()
        ending.join(grace)
        while ending.is_alive():
            cut(self.port)
            ending.join(POLL)


class Giver(Port):
    """Runs when made. answer: what is sent for a question, called on several threads; a QuarrelError is told to who wants
    it. key: a secret that every call must bring; empty is none. Raises QuarrelError for a port that cannot be opened."""

    def __init__(self, host: str, port: int, answer: Callable[[bytes], Iterable[Any]], key: str = "") -> None:
        try:
            super().__init__(f"grpc://{host}:{port}", middleware={"key": _KeyCheck(key)} if key else None)
        except (pa.ArrowException, OSError) as error:
            message = f"the port {port} of {host} cannot be opened ({first_line(error)}): choose another"
            raise QuarrelError(message) from None
        self._answer = answer

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        try:
            made = self._answer(ticket.ticket)
        except QuarrelError as error:
            raise flight.FlightServerError(str(error)) from None
        return flight.GeneratorStream(_SCHEMA, _batches(made))


class _KeyCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    def __init__(self, key: str) -> None:
        super().__init__()
        self._wanted = f"Bearer {key}".encode()

    def start_call(self, info: Any, headers: dict[str, list[str | bytes]]) -> None:
        for given in headers.get("authorization", []):
            if hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._wanted):
                return
        raise flight.FlightUnauthenticatedError("the key is missing or another")


def _batches(made: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    for data in made:
        whole = pa.py_buffer(data)
        for at in range(0, whole.size, PIECE):
            piece = whole.slice(at, min(PIECE, whole.size - at))
            ends = pa.py_buffer((0).to_bytes(8, "little") + piece.size.to_bytes(8, "little"))
            row = pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, piece])  # which copies nothing
            yield pa.RecordBatch.from_arrays([row], schema=_SCHEMA)


class Taker:
    """Asks a `Giver`. seconds: for a question and all that comes of it. Safe for threads."""

    def __init__(self, address: str, seconds: float, key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._connection = Connection(address, Access(seconds, headers), Retry(attempts=1))

    def take(self, question: bytes) -> Taken:
        """Raises FlightUnavailable, FlightError and FlightDataError, here and while it is read."""
        c = self._connection
        with c.sentences("a prompt"):
            reader = c.client.do_get(flight.Ticket(question), c.options())
            if reader.schema != _SCHEMA:
                raise FlightDataError(f"{c.address} sent something else than a prompt: is it quarrel prefill?")
            return Taken(reader, c)

    def close(self) -> None:
        self._connection.close()


class Taken:
    """What comes, to be read once."""

    def __init__(self, reader: flight.FlightStreamReader, connection: Connection) -> None:
        self._reader, self._connection = reader, connection

    def readinto(self, memory: np.ndarray[Any, Any], /) -> int:
        """All of it, by one copy that keeps no other thread waiting: how many bytes. Raises FlightDataError for more than
        there is room for."""
        at = 0
        with self._connection.sentences("a prompt"):
            while True:
                try:
                    batch = self._reader.read_chunk().data
                except StopIteration:
                    return at
                for piece in (found.as_buffer() for found in batch["piece"]):
                    if piece is None or not piece.size:
                        continue
                    if at + piece.size > len(memory):
                        raise FlightDataError(
                            f"{self._connection.address} sent more than a prompt has: is it quarrel prefill?"
                        )
                    np.copyto(memory[at : at + piece.size], np.frombuffer(piece, np.uint8))
                    at += piece.size

    def close(self) -> None:
        """Ends it, also where more would come."""
        with self._connection.sentences("a prompt"):
            self._reader.cancel()
