"""A client for Longbow, written to what its server does: two ports, datasets by name, searches by a JSON ticket."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import flight

from quarrel.errors import FlightDataError, FlightUnavailable, RequestError
from quarrel.flight.connection import Access, Connection, Retry
from quarrel.flight.messages import Filter, dataset_name, get_ticket, parse_object, search_ticket
from quarrel.flight.results import Dataset, Hits, Readiness
from quarrel.flight.rows import numbers, query_vector, vector_field
from quarrel.flight.streams import Acks, Caps, Pressure, checked, descriptor, listen_for_pressure, same_schema, schema_of

Array = npt.NDArray[Any]
Batches: TypeAlias = "pa.RecordBatch | Iterable[pa.RecordBatch]"

DATA, META = "grpc://127.0.0.1:3000", "grpc://127.0.0.1:3001"
POLL, LONGEST_POLL = 0.05, 1.0
FRESH = 16
"""Result counts that `fresh` cycles through: Longbow keeps the answer to the same question for a minute."""


class LongbowClient:
    """Vectors to and from a Longbow store. Safe for threads; a context manager.

    data: the port of DoPut, DoGet and DoExchange. meta: the port of everything that is about datasets. access: deadlines,
    headers, TLS. retry: for calls that change nothing.

    All calls raise FlightUnavailable where the server cannot be reached in time, FlightError for what it refuses,
    FlightDataError for what comes back unsound, RequestError for arguments that can never work.
    """

    def __init__(
        self, data: str = DATA, meta: str = META, *, access: Access | None = None, retry: Retry | None = None
    ) -> None:
        access, retry = access or Access(), retry or Retry()
        self._data, self._meta = Connection(data, access, retry), Connection(meta, access, retry)
        self._timeout = access.timeout
        self._turn = itertools.count()
        self.slow_downs = 0

    def __repr__(self) -> str:
        return f"LongbowClient(data={self._data.address!r}, meta={self._meta.address!r})"

    def __enter__(self) -> LongbowClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes both connections."""
        self._data.close()
        self._meta.close()

    def put(self, dataset: str, batches: Batches, *, timeout: float | None = None) -> int:
        """Streams rows (see `vector_batch`) and returns how many; pauses while the server says slow_down.

        The server acknowledges nothing here: after an error it is not known which rows arrived. `ingest` tells. The first
        batch is compared with the dataset, if there is one, before anything is sent. timeout: for the whole stream.
        """
        name, rows, pressure = dataset_name(dataset), 0, Pressure()
        stream = self._stream(name, batches)
        first = next(stream, None)
        if first is None:
            return 0
        with self._data.sentences(f"the put into {name}"):
            options = self._data.options(timeout)
            writer, reader = self._data.client.do_put(descriptor(name), first.schema, options)
            listener = listen_for_pressure(reader, pressure)
            try:
                for batch in itertools.chain([first], stream):
                    pressure.wait()
                    writer.write_batch(batch)
                    rows += batch.num_rows
                writer.done_writing()
                listener.join()
            finally:
                _close(writer, listener)
        self.slow_downs += pressure.signals
        return rows

    def ingest(
        self, dataset: str, batches: Batches, *, acked: Callable[[int], None] | None = None, timeout: float | None = None
    ) -> int:
        """As `put`, by an exchange that acknowledges every batch: `acked` is called with the rows of each, in their order,
        on another thread. Returns the rows acknowledged, all of them unless it raises."""
        name = dataset_name(dataset)
        stream = self._stream(name, batches)
        first = next(stream, None)
        if first is None:
            return 0
        with self._data.sentences(f"the ingest into {name}"):
            writer, reader = self._data.client.do_exchange(descriptor("ingest", name), self._data.options(timeout))
            acks = Acks(reader, acked or (lambda rows: None))
            try:
                writer.begin(first.schema)
                for batch in itertools.chain([first], stream):
                    acks.before(batch.num_rows)
                    writer.write_batch(batch)
                writer.done_writing()
                acks.finish()
            except BaseException:
                _abandon(writer, reader)
                raise
            writer.close()
            return acks.rows

    def get(
        self,
        dataset: str,
        *,
        filters: Sequence[Filter] = (),
        limit: int | None = None,
        caps: Caps | None = None,
        timeout: float | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Batches of a dataset, each checked in full before it is given out. `limit` rows at most, which is kept here: the
        server reads the number and does nothing with it."""
        name = dataset_name(dataset)
        if limit is not None and limit < 1:
            raise RequestError(f"limit is {limit!r}, wanted at least 1")
        ticket = flight.Ticket(get_ticket(name, filters))
        what = f"the rows of {name}"
        reader = self._data.run(lambda: self._begin(ticket, timeout), what)
        left = limit
        with self._data.sentences(what):
            for batch in checked(reader, caps or Caps()):
                part = batch if left is None else batch.slice(0, left)
                yield part
                left = None if left is None else left - part.num_rows
                if left == 0:
                    return

    def search(
        self,
        dataset: str,
        vector: Any,
        k: int = 10,
        *,
        filters: Sequence[Filter] = (),
        fresh: bool = False,
        timeout: float | None = None,
    ) -> Hits:
        """The `k` nearest rows. fresh: not an answer that the server kept from before the last put."""
        name, query, rows = self._query(dataset, vector, k, fresh)
        ticket = flight.Ticket(search_ticket(name, query, rows, filters))

        def call() -> Hits:
            return _hits(checked(self._begin(ticket, timeout), Caps(rows=rows, nbytes=rows << 16)), k)

        return self._data.run(call, f"a search in {name}")

    def exchange(
        self, dataset: str, vector: Any, k: int = 10, *, fresh: bool = False, timeout: float | None = None
    ) -> Hits:
        """As `search`, by DoExchange with the command VectorSearch. Takes no filters."""
        name, query, rows = self._query(dataset, vector, k, fresh)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(query), len(query))
        columns = {"dataset": pa.array([name]), "k": pa.array([rows], pa.int32()), "query_vector": lists}
        batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

        def call() -> Hits:
            command = flight.FlightDescriptor.for_command(b"VectorSearch")
            writer, reader = self._data.client.do_exchange(command, self._data.options(timeout))
            try:
                writer.begin(batch.schema)
                writer.write_batch(batch)
                writer.done_writing()
                hits = _hits(checked(reader, Caps(rows=rows, nbytes=rows << 16)), k)
            except BaseException:
                _abandon(writer, reader)
                raise
            writer.close()
            return hits

        return self._data.run(call, f"a search in {name}")

    def info(self, dataset: str) -> Dataset:
        """Size of a dataset. FlightError where there is none."""
        name = dataset_name(dataset)
        options = self._meta.options()
        return self._meta.run(lambda: _dataset(self._meta.client.get_flight_info(descriptor(name), options), name), "info")

    def list(self, contains: str | None = None) -> list[Dataset]:
        """All datasets, or those whose name holds a text."""
        criteria = b"" if contains is None else json.dumps({"name": contains}).encode()
        options = self._meta.options()
        return self._meta.run(
            lambda: [_dataset(f, None) for f in self._meta.client.list_flights(criteria, options)], "the list of datasets"
        )

    def schema(self, dataset: str) -> pa.Schema:
        """Columns of a dataset, from the head of its stream: Longbow's GetSchema is empty."""
        ticket = flight.Ticket(get_ticket(dataset_name(dataset), ()))

        def call() -> pa.Schema:
            reader = self._begin(ticket, None)
            try:
                return schema_of(reader)
            finally:
                reader.cancel()

        return self._data.run(call, f"the schema of {dataset}")

    def delete(self, dataset: str, id: int | str | None = None) -> None:
        """Deletes a dataset, or the row with an id (as its `id` column has it)."""
        body: dict[str, str] = {"dataset": dataset_name(dataset)}
        if id is not None:
            body["id"] = str(id)
        self._act("delete-dataset" if id is None else "delete", body)

    def readiness(self, dataset: str) -> Readiness:
        """Whether what was put is indexed yet."""
        said = self._act("check_readiness", {"dataset": dataset_name(dataset)})
        status, indexed = said.get("status"), said.get("index_len", 0)
        if status not in ("READY", "BUSY", "NOT_FOUND") or isinstance(indexed, bool) or not isinstance(indexed, int):
            raise FlightDataError(f"the server's readiness is {str(said)[:120]}, wanted READY, BUSY or NOT_FOUND")
        return Readiness(status, indexed, str(said.get("reason", "")))

    def wait_ready(self, dataset: str, rows: int = 0, *, timeout: float = 60.0) -> Readiness:
        """Waits until a dataset is ready, with at least `rows` in its index. FlightUnavailable after `timeout` seconds."""
        end, pause = time.monotonic() + timeout, POLL
        while True:
            now = self.readiness(dataset)
            if now.status == "READY" and now.indexed >= rows:
                return now
            if time.monotonic() + pause > end:
                raise FlightUnavailable(
                    f"{dataset} is {now.status} with {now.indexed} rows indexed after {timeout:g} s, wanted READY with"
                    f" {rows}: wait longer, or look at the server"
                )
            time.sleep(pause)
            pause = min(LONGEST_POLL, pause * 1.5)

    def ids(self, dataset: str, low: int, high: int) -> set[int]:
        """Which of the ids from `low` up to `high` are there; none where the dataset is missing."""
        if self.readiness(dataset).status == "NOT_FOUND":
            return set()
        batches = self.get(dataset, filters=[("id", ">=", low), ("id", "<", high)])
        return {i for batch in batches for i in numbers(batch, "id", pa.int64()).tolist()}

    def _begin(self, ticket: flight.Ticket, timeout: float | None) -> Any:
        return self._data.client.do_get(ticket, self._data.options(timeout))

    def _act(self, action: str, body: dict[str, str]) -> dict[str, Any]:
        message = flight.Action(action, json.dumps(body).encode())

        def call() -> dict[str, Any]:
            answers = list(self._meta.client.do_action(message, self._meta.options()))
            return parse_object(answers[0].body.to_pybytes(), action) if answers else {}

        return self._meta.run(call, action)

    def _query(self, dataset: str, vector: Any, k: int, fresh: bool) -> tuple[str, Array, int]:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= 1 << 20:
            raise RequestError(f"k is {k!r}, wanted a whole number from 1 to {1 << 20}", "k")
        more = 1 + next(self._turn) % FRESH if fresh else 0
        return dataset_name(dataset), query_vector(vector), k + more

    def _stream(self, name: str, batches: Batches) -> Iterator[pa.RecordBatch]:
        """The batches, the first of which agrees with the dataset where that exists."""
        stream = same_schema([batches] if isinstance(batches, pa.RecordBatch) else batches)
        for i, batch in enumerate(stream):
            if i == 0:
                kind, dim = vector_field(batch.schema)
                self._agree(name, kind, dim)
            yield batch

    def _agree(self, name: str, kind: pa.DataType, dim: int) -> None:
        if self.readiness(name).status == "NOT_FOUND":
            return
        there = vector_field(self.schema(name))
        if there != (kind, dim):
            raise RequestError(
                f"the vectors are {kind}[{dim}] and {name} holds {there[0]}[{there[1]}]: use the model that filled it, or"
                " another dataset"
            )


def _hits(batches: Iterator[pa.RecordBatch], k: int) -> Hits:
    ids, scores = [np.empty(0, np.uint64)], [np.empty(0, np.float32)]
    for batch in batches:
        ids.append(numbers(batch, "id", pa.uint64()))
        scores.append(numbers(batch, "score", pa.float32()))
    return Hits(np.concatenate(ids)[:k], np.concatenate(scores)[:k])


def _dataset(info: flight.FlightInfo, name: str | None) -> Dataset:
    path = [part.decode("utf-8", "replace") for part in (info.descriptor.path or [])]
    return Dataset(name or "/".join(path), int(info.total_records), int(info.total_bytes))


def _close(writer: Any, listener: threading.Thread) -> None:
    """Ends a put whichever way it went, and raises what the server said of it."""
    try:
        writer.close()
    finally:
        listener.join()


def _abandon(writer: Any, reader: Any) -> None:
    """Ends an exchange that failed: both sides stop, and only the first fault is raised."""
    reader.cancel()
    with suppress(pa.ArrowException, OSError):
        writer.close()
