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

from quarrel.errors import QuarrelError, RequestError
from quarrel.flight.messages import parse_object
from quarrel.flight.rows import first_line, validated
from quarrel.flight.store import Missing, Store

Body = dict[str, Any]


class LocalServer:
    """Both servers on one store, running when made; a context manager. Port 0 takes a free one, see `data` and `meta`."""

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
        self._closed.set()
        for server in (self._data, self._meta):
            server.shutdown()
        self.store.close()


class _Port(flight.FlightServerBase):  # type: ignore[misc]
    """What both ports do."""

    def __init__(self, location: str, store: Store) -> None:
        super().__init__(location)
        self.store = store

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        with _answers():
            body: Body = {"name": ticket.ticket.decode()}
            if ticket.ticket.startswith(b"{"):
                body = parse_object(ticket.ticket, "a ticket")
            if "search" in body:
                return flight.RecordBatchStream(self.store.search(ticket.ticket, body["search"]))
            table = self.store.table(str(body.get("name", body.get("dataset", ""))), body.get("filters") or [])
            return flight.RecordBatchStream(table)

    def get_schema(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.SchemaResult:
        return flight.SchemaResult(pa.schema([]))

    def do_action(self, context: Any, action: flight.Action) -> Iterator[bytes]:
        with _answers():
            body = parse_object(action.body.to_pybytes() or b"{}", action.type)
            return iter([json.dumps(self._act(action.type, body)).encode()])

    def _act(self, kind: str, body: Body) -> Body:
        name = str(body.get("dataset", ""))
        if kind == "check_readiness":
            return self.store.readiness(name)
        if kind == "delete-dataset":
            self.store.drop(name)
        elif kind in ("delete", "Delete"):
            self.store.find(name).deleted.add(str(body.get("id")))
        elif kind != "cluster-status":
            raise RequestError(f"unknown action: {kind}")
        return {"status": "ok"}


class DataPort(_Port):
    """Rows: put, get, exchange."""

    def do_put(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        with _answers():
            if not descriptor.path:
                raise RequestError("a path is needed to name the dataset")
            kept = self.store.open(descriptor.path[0].decode(), reader.schema)
            for chunk in reader:
                if not self.store.add(kept, validated(chunk.data)):
                    writer.write(json.dumps({"status": "slow_down", "reason": "wal_pressure"}).encode())

    def do_exchange(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        with _answers():
            path = [p.decode() for p in descriptor.path or []]
            if descriptor.command == b"VectorSearch":
                self._search(reader, writer)
            elif len(path) == 2 and path[0] == "ingest":
                self._ingest(path[1], reader, writer)
            else:
                raise RequestError(f"unknown exchange: {descriptor}")

    def _ingest(self, name: str, reader: Any, writer: Any) -> None:
        kept = self.store.open(name, reader.schema)
        for number, chunk in enumerate(reader):
            self.store.add(kept, validated(chunk.data))
            ack = {"status": "acked", "batch_id": number, "rows": chunk.data.num_rows}
            writer.write_metadata(json.dumps(ack).encode())

    def _search(self, reader: Any, writer: Any) -> None:
        query = validated(reader.read_chunk().data).to_pylist()[0]
        body = {"dataset": query["dataset"], "k": query.get("k") or 10, "vector": query["query_vector"]}
        found = self.store.search(json.dumps(body).encode(), body)
        writer.begin(found.schema)
        for batch in found.to_batches():
            writer.write_batch(batch)

    def list_flights(self, context: Any, criteria: bytes) -> Any:
        raise NotImplementedError("use MetaServer")

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        raise NotImplementedError("use MetaServer")


class MetaPort(_Port):
    """What there is."""

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        with _answers():
            wanted = parse_object(criteria or b"{}", "criteria").get("name", "")
            return iter([self._info(n) for n in self.store.names() if wanted in n])

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        with _answers():
            return self._info(descriptor.path[0].decode() if descriptor.path else "")

    def do_put(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        raise NotImplementedError("use DataServer")

    def do_exchange(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        raise NotImplementedError("use DataServer")

    def _info(self, name: str) -> flight.FlightInfo:
        # Longbow counts batches here, and gives neither schema nor endpoints.
        batches = self.store.find(name).batches
        path = flight.FlightDescriptor.for_path(name)
        return flight.FlightInfo(pa.schema([]), path, [], len(batches), sum(b.nbytes for b in batches))


class _answers:
    """Our errors as Flight's."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Missing):
            raise flight.FlightServerError(f"NOT_FOUND: {error}") from None
        if isinstance(error, QuarrelError):
            raise pa.ArrowInvalid(str(error)) from None
