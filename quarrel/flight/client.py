"""A client for Longbow, written to what its server does: two ports, datasets by name, searches by a JSON ticket."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import flight

from quarrel.errors import FlightDataError, FlightNotFound, RequestError
from quarrel.flight.connection import Access, Connection, Retry
from quarrel.flight.filters import EXACT, Filter, filters_of
from quarrel.flight.messages import Filters, check_done, dataset_name, encoded, get_ticket, parse_object, search_ticket
from quarrel.flight.ranking import MEASURES, Measure, Uneven, is_l2, ranked, uneven, vectors_of, warn_of
from quarrel.flight.results import Dataset, Hits, Readiness, dataset_of, hits_by_id, hits_of
from quarrel.flight.rows import numbers, query_vector, vector_field
from quarrel.flight.streams import WINDOW, Acks, Caps, Pressure, abandon, checked, descriptor, same_schema, schema_of
from quarrel.flight.tickets import passing
from quarrel.flight.waiting import until_ready

Array = npt.NDArray[Any]
Batches: TypeAlias = "pa.RecordBatch | Iterable[pa.RecordBatch]"

DATA, META = "grpc://127.0.0.1:3000", "grpc://127.0.0.1:3001"
WHOLE = 3600.0
"""Seconds for reading a whole dataset."""
WIDER = 4
"""How many times k rows are fetched to be ranked by another measure."""
LOOKED_AT = 16
"""How many results of a search with comparisons are looked at for rows that should not have passed."""
FRESH = 16
"""Result counts that `fresh` cycles through: Longbow keeps the answer to the same question for a minute."""


class LongbowClient:
    """Vectors to and from a Longbow store. Safe for threads; a context manager.

    data: the port of DoPut, DoGet and DoExchange. meta: the port of everything that is about datasets. access: deadlines,
    headers, TLS. retry: for calls that change nothing.

    All calls raise FlightUnavailable where the server cannot be reached in time, FlightNotFound where it has no such
    dataset, FlightError for what else it refuses, FlightDataError for what comes back unsound, RequestError for arguments
    that can never work.
    """

    def __init__(
        self, data: str = DATA, meta: str = META, *, access: Access | None = None, retry: Retry | None = None
    ) -> None:
        access, retry = access or Access(), retry or Retry()
        self._data, self._meta = Connection(data, access, retry), Connection(meta, access, retry)
        self._timeout = access.timeout
        self._turn = itertools.count()
        self._uneven: dict[str, Uneven | None] = {}
        self.slow_downs = 0

    def __repr__(self) -> str:
        return f"LongbowClient(data={self._data.address!r}, meta={self._meta.address!r})"

    def __enter__(self) -> LongbowClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Of the data port."""
        return self._data.address

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
        batches, allowed = itertools.chain([first], stream), timeout or self._timeout
        end = time.monotonic() + allowed
        with self._data.sentences(f"the put into {name}", timeout=timeout, writes=True):
            for batch in batches:
                pressure.wait()
                options = self._data.options(max(0.001, end - time.monotonic()))
                writer, reader = self._data.client.do_put(descriptor(name), first.schema, options)
                try:
                    for one in itertools.chain([batch], itertools.islice(batches, WINDOW - 1)):
                        writer.write_batch(one)
                        rows += one.num_rows
                    writer.done_writing()
                    pressure.read(reader)
                finally:
                    writer.close()
        self.slow_downs += pressure.signals
        return rows

    def ingest(
        self, dataset: str, batches: Batches, *, acked: Callable[[int], None] | None = None, timeout: float | None = None
    ) -> int:
        """As `put`, by an exchange that acknowledges every batch: `acked` is called with the rows of each, in their order,
        at most WINDOW batches later. Returns the rows acknowledged, all of them unless it raises."""
        name = dataset_name(dataset)
        stream = self._stream(name, batches)
        first = next(stream, None)
        if first is None:
            return 0
        with self._data.sentences(f"the ingest into {name}", timeout=timeout, writes=True):
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
                abandon(writer, reader)
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
        """Batches of a dataset, each checked in full before it is given out. The server filters by = and != alone; what
        is less or greater is found here, in all other rows. `limit` rows at most, which is kept here too."""
        name = dataset_name(dataset)
        if limit is not None and limit < 1:
            raise RequestError(f"limit is {limit!r}, wanted at least 1")
        left, conditions = limit, self._filters(name, filters)
        sent = [c for c in conditions if c["operator"] in EXACT]
        for batch in self._get(name, sent, caps or Caps(), timeout):
            kept = passing(batch, conditions, silent=True)
            if conditions and not kept.num_rows:
                continue
            part = kept if left is None else kept.slice(0, left)
            yield part
            left = None if left is None else left - part.num_rows
            if left == 0:
                return

    def rows(self, dataset: str, ids: Iterable[int]) -> Iterator[pa.RecordBatch]:
        """The rows with these ids, each asked for by itself; nothing comes for an id that is not there. FlightDataError
        where ids are texts: searches then give row numbers, which may be the ids of other rows."""
        name = dataset_name(dataset)
        for id in ids:
            condition = filters_of([("id", "==", int(id))])
            for batch in self._get(name, condition, Caps()):
                if (kept := passing(batch, condition, silent=True)).num_rows:
                    if not pa.types.is_integer(kind := kept.schema.field("id").type):
                        raise FlightDataError(
                            f"the column id of {name} is {kind}, wanted whole numbers: searches in it give row numbers"
                        )
                    yield kept

    def search(
        self,
        dataset: str,
        vector: Any,
        k: int = 10,
        *,
        filters: Sequence[Filter] = (),
        fresh: bool = False,
        rerank: Measure | None = None,
        timeout: float | None = None,
    ) -> Hits:
        """The `k` nearest rows. fresh: not an answer that the server kept from before the last put. FlightDataError where a
        filter by order let a row through that it should not.

        rerank: fetches the 4 k nearest by L2 and ranks them exactly by another measure. Without it, a dataset that this
        client filled for such a measure with vectors of different lengths gives an OptionWarning, once."""
        if rerank is not None and rerank not in MEASURES:
            raise RequestError(f"rerank is {rerank!r}, wanted one of {', '.join(MEASURES)}", "rerank")
        name, query, rows = self._query(dataset, vector, k, fresh)
        rows += k * (WIDER - 1) if rerank else 0
        conditions = self._filters(name, filters)
        ticket = flight.Ticket(search_ticket(name, query, rows, conditions))

        def call() -> Hits:
            return hits_of(checked(self._begin(ticket, timeout), Caps(rows=rows, nbytes=rows << 16)), query)

        hits = self._data.run(call, f"a search in {name}", name, timeout)
        if any(c["operator"] not in EXACT for c in conditions):
            self._check_passed(name, hits, conditions)
        if rerank:
            return self._ranked(name, hits, query, rerank, k)
        wants = self._uneven.get(name) if len(hits) else None
        if wants is not None:
            self._uneven[name] = None  # it is said once
            if is_l2(hits, query, lambda id: self._vectors(name, [id], len(query))[1]):
                warn_of(name, wants, self._data.address)
        return hits.first(k)

    def search_by_id(self, dataset: str, id: int | str, k: int = 10) -> Hits:
        """The `k` rows nearest to the one with an id, itself among them. `Hits.cosines` takes that to be of length 1 too.
        FlightNotFound where there is no such row."""
        name, _, _ = self._query(dataset, [0.0], k, False)
        body = {"dataset": name, "id": str(id), "k": k}
        said = parse_object(b"".join(self._act("VectorSearchByID", body)), "VectorSearchByID")
        return hits_by_id(said).first(k)

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
                hits = hits_of(checked(reader, Caps(rows=rows, nbytes=rows << 16)), query)
            except BaseException:
                abandon(writer, reader)
                raise
            writer.close()
            return hits.first(k)

        return self._data.run(call, f"a search in {name}", name, timeout)

    def info(self, dataset: str) -> Dataset:
        """Size of a dataset. FlightNotFound where there is none."""
        name = dataset_name(dataset)

        def call() -> Dataset:
            return dataset_of(self._meta.client.get_flight_info(descriptor(name), self._meta.options()), name)

        return self._meta.run(call, "info", name)

    def exists(self, dataset: str) -> bool:
        """Whether there is a dataset, by GetFlightInfo: `readiness` does not tell while anything is being indexed."""
        try:
            self.info(dataset)
        except FlightNotFound:
            return False
        return True

    def list(self, contains: str | None = None) -> list[Dataset]:
        """All datasets, or those whose name holds a text."""
        criteria = b"" if contains is None else encoded({"name": contains})
        options = self._meta.options()
        return self._meta.run(
            lambda: [dataset_of(f, None) for f in self._meta.client.list_flights(criteria, options)], "the list of datasets"
        )

    def schema(self, dataset: str) -> pa.Schema:
        """Columns of a dataset, from the head of its stream: Longbow's GetSchema is empty."""
        name = dataset_name(dataset)
        ticket = flight.Ticket(get_ticket(name))

        def call() -> pa.Schema:
            reader = self._begin(ticket, None)
            try:
                return schema_of(reader)
            finally:
                reader.cancel()

        return self._data.run(call, f"the schema of {name}", name)

    def delete(self, dataset: str, id: int | str | None = None) -> None:
        """Deletes a dataset, or the row with an id (as its `id` column has it)."""
        body: dict[str, str] = {"dataset": dataset_name(dataset)}
        if id is not None:
            body["id"] = str(id)
        action = "delete-dataset" if id is None else "delete"
        check_done(self._act(action, body), action)
        if id is None:
            self._uneven.pop(dataset, None)

    def readiness(self, dataset: str) -> Readiness:
        """Whether what was put is indexed yet."""
        answers = self._act("check_readiness", {"dataset": dataset_name(dataset)})
        said = parse_object(answers[0] if answers else b"", "check_readiness")
        status, indexed = said.get("status"), said.get("index_len", 0)
        if status not in ("READY", "BUSY", "NOT_FOUND") or isinstance(indexed, bool) or not isinstance(indexed, int):
            raise FlightDataError(f"the server's readiness is {str(said)[:120]}, wanted READY, BUSY or NOT_FOUND")
        return Readiness(status, indexed, str(said.get("reason", "")))

    def wait_ready(
        self,
        dataset: str,
        rows: int = 0,
        *,
        timeout: float = 60.0,
        progress: Callable[[Readiness], None] | None = None,
    ) -> Readiness:
        """Waits until a dataset is ready, with at least `rows` in its index. FlightUnavailable after `timeout` seconds, or
        where it stays ready with fewer. `progress` is called after each look."""
        name = dataset_name(dataset)
        return until_ready(lambda: self.readiness(name), name, rows, timeout, progress, missing=lambda: self.info(name))

    def ids(self, dataset: str, low: int, high: int) -> set[int]:
        """Which of the ids from `low` up to `high` are there; see `counts`."""
        return set(self.counts(dataset, low, high))

    def counts(self, dataset: str, low: int, high: int) -> Counter[int]:
        """How many rows have each of the ids from `low` up to `high`; none where the dataset is missing. Reads all rows and
        picks the ids here, as the store's comparison may lose some."""
        found: Counter[int] = Counter()
        if self.exists(dataset):
            for batch in self._get(dataset, [], Caps(), max(WHOLE, self._timeout)):
                ids = numbers(batch, "id", pa.int64())
                found.update(ids[(ids >= low) & (ids < high)].tolist())
        return found

    def _filters(self, name: str, filters: Sequence[Filter]) -> Filters:
        """As a ticket has them, each of which the store will know."""
        return filters_of(filters, self.schema(name)) if filters_of(filters) else []

    def _get(self, name: str, filters: Filters, caps: Caps, timeout: float | None = None) -> Iterator[pa.RecordBatch]:
        ticket, what = flight.Ticket(get_ticket(name, filters)), f"the rows of {name}"
        reader = self._data.run(lambda: self._begin(ticket, timeout), what, name, timeout)
        with self._data.sentences(what, name, timeout):
            yield from checked(reader, caps)

    def _check_passed(self, name: str, hits: Hits, conditions: Filters) -> None:
        for id in hits.ids[:LOOKED_AT].tolist():
            rows = list(self.rows(name, [id]))
            if rows and not any(passing(batch, conditions, silent=True).num_rows for batch in rows):
                raise FlightDataError(
                    f"{self._data.address} let row {id} of {name} through a filter that it does not pass, so others may be"
                    " missing (a Longbow does so with AVX-512): filter by = or !=, or get the rows and rank them yourself"
                )

    def _vectors(self, name: str, ids: Iterable[int], dim: int) -> tuple[Array, Array]:
        """Ids and vectors `[n, dim]` of the rows with these ids."""
        found = [(int(id), vectors_of(batch)) for id in ids for batch in self.rows(name, [int(id)])]
        vectors = np.concatenate([np.empty((0, dim), np.float32), *(v for _, v in found)])
        return np.array([id for id, v in found for _ in range(len(v))], np.uint64), vectors

    def _ranked(self, name: str, hits: Hits, query: Array, measure: Measure, k: int) -> Hits:
        ids, vectors = self._vectors(name, dict.fromkeys(hits.ids.tolist()), len(query))
        return ranked(ids, vectors, query, measure, k)

    def _begin(self, ticket: flight.Ticket, timeout: float | None) -> Any:
        return self._data.client.do_get(ticket, self._data.options(timeout))

    def _act(self, action: str, body: Mapping[str, object]) -> tuple[bytes, ...]:
        message = flight.Action(action, encoded(body))

        def call() -> tuple[bytes, ...]:
            return tuple(answer.body.to_pybytes() for answer in self._meta.client.do_action(message, self._meta.options()))

        return self._meta.run(call, action, str(body["dataset"]))

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
                if name not in self._uneven and (wants := uneven(batch)) is not None:
                    self._uneven[name] = wants
            yield batch

    def _agree(self, name: str, kind: pa.DataType, dim: int) -> None:
        if not self.exists(name):
            return
        there = vector_field(self.schema(name))
        if there != (kind, dim):
            raise RequestError(
                f"the vectors are {kind}[{dim}] and {name} holds {there[0]}[{there[1]}]: use the model that filled it, or"
                " another dataset"
            )
