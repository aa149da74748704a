"""A server with Longbow's two ports, for tests and experiments. Its datasets are in memory and end with it.

The data port has DoPut, DoGet and DoExchange; the meta port has DoGet, ListFlights and GetFlightInfo; both take actions.
Each refuses what the other does, as Longbow's do. It is no vector store: nothing is written to disk, and every search looks
at every row.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import flight

from quarrel.errors import FlightUnavailable, QuarrelError, RequestError
from quarrel.flight.actions import Unknown, act
from quarrel.flight.handover import Port
from quarrel.flight.rows import first_line, validated
from quarrel.flight.sockets import cut
from quarrel.flight.store import POLL, Kept, Missing, Store
from quarrel.flight.tickets import json_body, text_of

GRACE = 0.5
"""Seconds for the calls in flight on a server that is closed."""


class LocalServer:
    """Both servers on one store, running when made; a context manager. Port 0 takes a free one, see `data` and `meta`.

    store: what it serves, with Longbow's faults unless it is `Store(kind=True)`; see there for its memory and its index.
    `cut`, `kill` and `restart` are for tests of what a client makes of that.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, meta_port: int = 0, store: Store | None = None) -> None:
        self.store = store or Store()
        self._host = host
        self._open(port, meta_port)
        self.data, self.meta = (f"grpc://{host}:{p.port}" for p in self._ports)

    def _open(self, *ports: int) -> None:
        self._closed = threading.Event()
        self._ports: list[_Port] = []
        try:
            for kind, port in zip((DataPort, MetaPort), ports):
                self._ports.append(kind(f"grpc://{self._host}:{port}", self.store))
        except (pa.ArrowException, OSError) as error:
            self.close(grace=0)
            raise QuarrelError(
                f"the ports {ports[0]} and {ports[1]} of {self._host} cannot be opened ({first_line(error)}): choose others"
            ) from None

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Until `close`, or an interrupt: unlike the library's own wait, which a signal does not reach."""
        while not self._closed.wait(POLL):
            pass  # a signal that came just before a wait without an end would be noticed by nobody

    def close(self, grace: float = GRACE) -> None:
        """Ends both ports. Calls in flight have `grace` seconds; then their connections are cut."""
        self.store.close()
        # Not as daemons: an interrupt here must not leave a port open, for which the interpreter would wait at its exit.
        ends = [threading.Thread(target=port.end, args=(grace,)) for port in self._ports]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        self._closed.set()

    def cut(self) -> None:
        """Breaks all connections, and goes on: the network's fault."""
        for port in self._ports:
            cut(port.port)

    def kill(self) -> None:
        """As the end of Longbow's process by a signal: every connection breaks at once. What was stored stays stored."""
        if not self._closed.is_set():  # its ports may be another's by now
            self.cut()
            self.close(grace=0)

    def restart(self) -> None:
        """As Longbow's process begun again, after `close` or `kill`: the same ports, the same rows, indexed once more."""
        self.store.restart()
        self._open(*(port.port for port in self._ports))


class _Port(Port):
    """What both ports do."""

    def __init__(self, location: str, store: Store) -> None:
        super().__init__(location)
        self.store = store

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        with _answers():
            body = self.store.tickets.read(ticket.ticket)
            if isinstance(search := body.get("search"), dict):
                return flight.RecordBatchStream(self.store.answer(ticket.ticket, search))
            name = text_of(body, "name") or text_of(body, "dataset")
            return flight.RecordBatchStream(self.store.table(name, body.get("filters") or []))

    def get_schema(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.SchemaResult:
        return flight.SchemaResult(pa.schema([]))

    def do_action(self, context: Any, action: flight.Action) -> Iterator[bytes]:
        with _answers():
            return iter([act(self.store, action.type, action.body.to_pybytes())])

    def list_actions(self, context: Any) -> Any:
        raise NotImplementedError("unimplemented")


class DataPort(_Port):
    """Rows: put, get, exchange."""

    def do_put(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        with _answers():
            if not descriptor.path:
                raise RequestError("a path is needed to name the dataset")
            kept = self.store.open(descriptor.path[0].decode(), reader.schema)
            for chunk in reader:
                if not self._add(context, kept, chunk.data):
                    writer.write(json.dumps({"status": "slow_down", "reason": "wal_pressure"}).encode())

    def do_exchange(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        with _answers():
            path = [p.decode() for p in descriptor.path or []]
            if descriptor.command == b"VectorSearch":
                self._search(reader, writer)
            elif len(path) == 2 and path[0] == "ingest":
                self._ingest(context, path[1], reader, writer)
            else:
                raise RequestError(f"unknown exchange: {descriptor}")

    def _ingest(self, context: Any, name: str, reader: Any, writer: Any) -> None:
        kept = self.store.open(name, reader.schema)
        for number, chunk in enumerate(reader):
            self._add(context, kept, chunk.data)
            ack = {"status": "acked", "batch_id": number, "rows": chunk.data.num_rows}
            writer.write_metadata(json.dumps(ack).encode())

    def _add(self, context: Any, kept: Kept, batch: pa.RecordBatch) -> bool:
        batch = validated(batch)
        if batch["vector"].null_count or batch["vector"].flatten().null_count:
            raise RequestError("the column vector holds nulls")
        self.store.reserve(batch.nbytes, context.is_cancelled)
        return self.store.add(kept, batch)

    def _search(self, reader: Any, writer: Any) -> None:
        rows = validated(reader.read_chunk().data).to_pylist()
        query = rows[0] if rows else {}
        body = {"dataset": query.get("dataset"), "k": query.get("k") or 10, "vector": query.get("query_vector")}
        found = self.store.answer(json.dumps(body).encode(), body)
        writer.begin(found.schema)
        for batch in found.to_batches():
            writer.write_batch(batch)

    def list_flights(self, context: Any, criteria: bytes) -> Any:
        raise NotImplementedError("ListFlights is not implemented on DataServer; use MetaServer")

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        raise NotImplementedError("GetFlightInfo is not implemented on DataServer; use MetaServer")


class MetaPort(_Port):
    """What there is."""

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        with _answers():
            wanted = text_of(json_body(criteria), "name")
            return iter([self._info(n) for n in self.store.names() if wanted in n])

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        with _answers():
            return self._info(descriptor.path[0].decode() if descriptor.path else "")

    def do_put(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        raise NotImplementedError("DoPut is not implemented on MetaServer; use DataServer")

    def do_exchange(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        raise NotImplementedError("DoExchange is not implemented on MetaServer; use DataServer")

    def _info(self, name: str) -> flight.FlightInfo:
        # Longbow counts batches here, and gives neither schema nor endpoints.
        batches = self.store.find(name).batches
        path = flight.FlightDescriptor.for_path(name)
        return flight.FlightInfo(pa.schema([]), path, [], len(batches), sum(b.nbytes for b in batches))


class _answers:
    """Our errors as Flight's, with the status codes that Longbow gives them."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Missing):
            raise pa.ArrowKeyError(str(error)) from None  # NOT_FOUND
        if isinstance(error, Unknown):
            raise NotImplementedError(str(error)) from None  # UNIMPLEMENTED
        if isinstance(error, FlightUnavailable):
            raise flight.FlightUnavailableError(str(error)) from None
        if isinstance(error, QuarrelError):
            raise pa.ArrowInvalid(str(error)) from None  # INVALID_ARGUMENT
