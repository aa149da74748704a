"""The local server's datasets: in memory, indexed a while after they arrive."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quarrel.errors import FlightUnavailable, QuarrelError, RequestError
from quarrel.flight.nearest import nearest, vector_of
from quarrel.flight.rows import METRIC_KEY, METRICS, vector_field
from quarrel.flight.tickets import Body, Tickets, passing, text_of

CACHE_SECONDS = 60.0
POLL = 0.05
"""Seconds between two looks at whether a caller who waits for room has gone."""


class Missing(QuarrelError):
    """There is no such dataset, or row."""


@dataclass
class Kept:
    """One dataset. `indexed`: how many of its batches a search sees. `deleted`: ids, and how many batches there were when
    each was deleted."""

    schema: pa.Schema
    metric: str
    dim: int
    batches: list[pa.RecordBatch] = field(default_factory=list)
    indexed: int = 0
    deleted: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Job:
    """A batch that waits to be indexed."""

    kept: Kept
    rows: int


class Store:
    """Datasets by name. Safe for threads.

    It has the faults of a real Longbow that a client has to survive, unless it is `kind`:

    * a ticket that is a bare name keeps the filters of the ticket before it (`Tickets`);
    * the score of a search is 1 / (1 + L2) whatever the dataset's metric is; a kind store's is the metric's distance;
    * readiness is BUSY for any name while another dataset is being indexed;
    * a filter that cannot be evaluated matches no row; a kind store refuses it;
    * deleted things are told as bare text; a kind store answers JSON;
    * when its memory is full, a call hangs until its caller gives up, and what was deleted counts still; a kind store
      refuses, and has the room of deleted datasets again.

    rate: rows indexed in a second; `hold_index` and `let_index` stop and start it. queue: batches waiting for that from
    which on senders get `slow_down`. memory: bytes of rows that it takes, any number if None.
    """

    def __init__(self, *, kind: bool = False, rate: float = math.inf, queue: int = 64, memory: int | None = None) -> None:
        self.kind, self.rate, self.queue, self.memory = kind, rate, queue, memory
        self.lock = threading.RLock()
        self._wake = threading.Condition(self.lock)
        self._datasets: dict[str, Kept] = {}
        self._used = 0
        self._paused = False
        self._start()

    def _start(self) -> None:
        self.tickets = Tickets(remembers=not self.kind)
        self._waiting: deque[_Job] = deque()
        self._answers: dict[bytes, tuple[float, pa.Table]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._index, name="quarrel-flight-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends indexing and whoever waits for room. The rows stay: `restart`."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def restart(self) -> None:
        """As Longbow after its process has ended and begun again: all rows are there, and are indexed once more."""
        self.close()
        self._thread.join()
        with self._wake:
            self._start()
            for kept in self._datasets.values():
                kept.indexed = 0
                self._waiting.extend(_Job(kept, b.num_rows) for b in kept.batches)
            self._wake.notify_all()

    def hold_index(self) -> None:
        """Nothing is indexed from now on, so what is put stays BUSY."""
        with self._wake:
            self._paused = True

    def let_index(self) -> None:
        """Indexing goes on."""
        with self._wake:
            self._paused = False
            self._wake.notify_all()

    def open(self, name: str, schema: pa.Schema) -> Kept:
        """The dataset to put rows of a schema into, made by the first who asks."""
        try:
            kind, dim = vector_field(schema)
        except QuarrelError as error:
            raise RequestError(str(error)) from None
        if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
            raise RequestError(f"the vectors are of {kind}, wanted numbers")
        with self.lock:
            kept = self._datasets.get(name)
            if kept is None:
                metric = (schema.metadata or {}).get(METRIC_KEY, b"euclidean").decode()
                if metric not in METRICS:
                    raise RequestError(f"longbow.metric is {metric!r}, wanted one of {', '.join(METRICS)}")
                kept = self._datasets[name] = Kept(schema, metric, dim)
            for column in schema:
                index = kept.schema.get_field_index(column.name)
                there = None if index < 0 else kept.schema.field(index).type
                if there not in (None, column.type):
                    raise RequestError(f"schema mismatch: {column.name} is {column.type}, not {there}")
                if index < 0:
                    kept.schema = kept.schema.append(column)
            return kept

    def reserve(self, nbytes: int, gone: Callable[[], bool]) -> None:
        """Takes room for a batch, and waits for ever where there is none, until the caller has `gone`."""
        with self._wake:
            while self.memory is not None and self._used + nbytes > self.memory:
                if self.kind:
                    raise RequestError(f"the store is full: {self._used} of {self.memory} bytes are taken; delete datasets")
                if self._closed or gone():
                    raise FlightUnavailable("the store had no room")
                self._wake.wait(POLL)
            self._used += nbytes

    def add(self, kept: Kept, batch: pa.RecordBatch) -> bool:
        """Stores a batch; False if there is more waiting to be indexed than there should."""
        with self._wake:
            if self._closed:
                raise FlightUnavailable("the store has ended")
            kept.batches.append(batch)
            self._waiting.append(_Job(kept, batch.num_rows))
            self._wake.notify_all()
            return len(self._waiting) <= self.queue

    def find(self, name: str) -> Kept:
        with self.lock:
            if name not in self._datasets:
                raise Missing(f"dataset not found: {name[:200]}")
            return self._datasets[name]

    def drop(self, name: str) -> None:
        """Deletes a dataset. What of it waits to be indexed goes on waiting."""
        with self.lock:
            kept = self.find(name)
            del self._datasets[name]
            if self.kind:
                self._used -= sum(b.nbytes for b in kept.batches)

    def delete(self, name: str, id: str) -> None:
        """Deletes the rows of a dataset that have an id now."""
        with self.lock:
            if vector_of(self.table(name, []), id) is None:
                raise Missing(f"id {id} not found in dataset {name}")
            kept = self.find(name)
            kept.deleted[id] = len(kept.batches)

    def names(self) -> list[str]:
        with self.lock:
            return sorted(self._datasets)

    def readiness(self, name: str) -> Body:
        with self.lock:
            kept = self._datasets.get(name)
            if not self.kind and any(job.kept is not kept for job in self._waiting):
                return {"status": "BUSY", "reason": f"global index queue has {len(self._waiting)} jobs"}
            if kept is None:
                return {"status": "NOT_FOUND", "reason": "dataset not found"}
            pending = len(kept.batches) - kept.indexed
            rows = sum(b.num_rows for b in kept.batches[: kept.indexed])
            if pending:
                return {"status": "BUSY", "reason": f"dataset has {pending} pending index jobs", "index_len": rows}
            return {"status": "READY", "index_len": rows}

    def table(self, name: str, filters: Any, *, indexed: bool = False) -> pa.Table:
        """Rows that pass all filters, by the newest schema; `indexed` ones only for a search."""
        with self.lock:
            kept = self.find(name)
            batches = kept.batches[: kept.indexed] if indexed else list(kept.batches)
            schema, deleted = kept.schema, dict(kept.deleted)
        tables = [
            _without(pa.Table.from_batches([b]), [d for d, n in deleted.items() if i < n]) for i, b in enumerate(batches)
        ]
        table = pa.concat_tables([schema.empty_table(), *tables], promote_options="default")
        return passing(table, filters, silent=not self.kind and not indexed)

    def search(self, body: Mapping[str, Any]) -> pa.Table:
        """Nearest rows as (id uint64, score float32)."""
        name, k = text_of(body, "dataset"), body.get("k")
        kept = self.find(name)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise RequestError(f"k must be at least 1, got {k!r}")
        try:
            with np.errstate(over="ignore"):
                query = np.asarray(body.get("vector") or [], np.float32)
        except (ValueError, TypeError):
            query = np.full(1, np.nan)
        if query.ndim != 1 or not np.isfinite(query).all():
            raise RequestError("invalid json body: the vector is no list of finite numbers")
        if query.size != kept.dim:
            raise RequestError(f"dimension mismatch: expected {kept.dim}, got {query.size}")
        table = self.table(name, body.get("filters") or [], indexed=True)
        return nearest(table, query, k, kept.metric if self.kind else None)

    def answer(self, ticket: bytes, body: Mapping[str, Any]) -> pa.Table:
        """As `search`. The answer to the same ticket is kept for a minute."""
        with self.lock:
            when, answer = self._answers.get(ticket, (0.0, None))
        if answer is None or time.monotonic() - when >= CACHE_SECONDS:
            answer = self.search(body)
            with self.lock:
                self._answers[ticket] = time.monotonic(), answer
        return answer

    def search_by_id(self, name: str, id: str, k: Any) -> pa.Table:
        """Nearest rows to a row that is there, itself among them."""
        vector = vector_of(self.table(name, []), id)
        if vector is None:
            raise Missing(f"id {id} not found in dataset {name}")
        return self.search({"dataset": name, "k": k, "vector": vector.tolist()})

    def _index(self) -> None:
        with self._wake:
            while not self._closed:
                if not self._waiting or self._paused:
                    self._wake.wait()
                    continue
                job = self._waiting[0]
                if self._wake.wait_for(lambda: self._closed, job.rows / self.rate):
                    return
                if not self._paused:
                    self._waiting.popleft()
                    job.kept.indexed += 1


def _without(table: pa.Table, ids: list[str]) -> pa.Table:
    if not ids or "id" not in table.column_names:
        return table
    return table.filter(pc.invert(pc.is_in(table["id"].cast(pa.string()), pa.array(ids))))
