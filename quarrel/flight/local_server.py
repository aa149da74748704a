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
from quarrel.flight.rows import first_line, validated
from quarrel.flight.store import Kept, Missing, Store
from quarrel.flight.tickets import json_body, text_of


class LocalServer:
    """Both servers on one store, running when made; a context manager. Port 0 takes a free one, see `data` and `meta`.

    store: what it serves, with Longbow's faults unless it is `Store(kind=True)`; see there for its memory and its index. A
    store outlives its server: `store.restart()` and another LocalServer are Longbow's process begun again.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, meta_port: int = 0, store: Store | None = None) -> None:
        self.store = store or Store()
        self._closed = threading.Event()
        try:
            self._data = DataPort(f"grpc://{host}:{port}", self.store)
            self._meta = MetaPort(f"grpc://{host}:{meta_port}", self.store)
        except (pa.ArrowException, OSError) as error:
            raise QuarrelError(
                f"the ports {port} and {meta_port} of {host} cannot be opened ({first_line(error)}): choose others"
            ) from None
        self.data, self.meta = f"grpc://{host}:{self._data.port}", f"grpc://{host}:{self._meta.port}"

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Until `close`, or an interrupt: unlike the library's own wait, which a signal does not reach."""
        self._closed.wait()

    def close(self) -> None:
        """Ends both ports, once the calls in flight have ended."""
        self._closed.set()
        self.store.close()
        for server in (self._data, self._meta):
            server.shutdown()


class _Port(flight.FlightServerBase):  # type: ignore[misc]
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
        self.store.reserve(batch.nbytes, context.is_cancelled)
        return self.store.add(kept, batch)

    def _search(self, reader: Any, writer: Any) -> None:
        query = validated(reader.read_chunk().data).to_pylist()[0]
        body = {"dataset": query["dataset"], "k": query.get("k") or 10, "vector": query["query_vector"]}
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
