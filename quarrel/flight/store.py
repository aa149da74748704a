"""The local server's datasets: in memory, indexed a while after they arrive, searched by brute force."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from quarrel.errors import QuarrelError, RequestError
from quarrel.flight.rows import METRIC_KEY, METRICS, vector_field

Array = npt.NDArray[Any]

CACHE_SECONDS = 60.0
OPERATORS = {
    "eq": pc.equal,
    "==": pc.equal,
    "neq": pc.not_equal,
    "!=": pc.not_equal,
    "gt": pc.greater,
    ">": pc.greater,
    "lt": pc.less,
    "<": pc.less,
    "ge": pc.greater_equal,
    ">=": pc.greater_equal,
    "le": pc.less_equal,
    "<=": pc.less_equal,
}


class Missing(QuarrelError):
    """There is no such dataset."""


@dataclass
class Kept:
    """One dataset. `indexed`: how many of its batches a search sees."""

    schema: pa.Schema
    metric: str
    dim: int
    batches: list[pa.RecordBatch] = field(default_factory=list)
    indexed: int = 0
    deleted: set[str] = field(default_factory=set)


class Store:
    """Datasets by name. index_seconds: how long a batch takes to be indexed. queue: batches waiting for that from which on
    senders get `slow_down`. Safe for threads."""

    def __init__(self, index_seconds: float = 0.0, queue: int = 64) -> None:
        self.index_seconds, self.queue = index_seconds, queue
        self.lock = threading.RLock()
        self._datasets: dict[str, Kept] = {}
        self._waiting: deque[Kept] = deque()
        self._wake = threading.Condition(self.lock)
        self._answers: dict[bytes, tuple[float, pa.Table]] = {}
        self._closed = False
        threading.Thread(target=self._index, name="quarrel-flight-index", daemon=True).start()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def open(self, name: str, schema: pa.Schema) -> Kept:
        """The dataset to put rows of a schema into, made by the first who asks."""
        try:
            dim = vector_field(schema)[1]
        except QuarrelError as error:
            raise RequestError(str(error)) from None
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

    def add(self, kept: Kept, batch: pa.RecordBatch) -> bool:
        """Stores a batch; False if there is more waiting to be indexed than there should."""
        with self._wake:
            kept.batches.append(batch)
            self._waiting.append(kept)
            self._wake.notify_all()
            return len(self._waiting) <= self.queue

    def find(self, name: str) -> Kept:
        with self.lock:
            if name not in self._datasets:
                raise Missing(f"dataset not found: {name}")
            return self._datasets[name]

    def drop(self, name: str) -> None:
        with self.lock:
            self.find(name)
            del self._datasets[name]

    def names(self) -> list[str]:
        with self.lock:
            return sorted(self._datasets)

    def readiness(self, name: str) -> dict[str, Any]:
        with self.lock:
            if name not in self._datasets:
                return {"status": "NOT_FOUND", "reason": "dataset not found", "index_len": 0}
            kept = self._datasets[name]
            busy = kept.indexed < len(kept.batches)
            indexed = sum(b.num_rows for b in kept.batches[: kept.indexed])
            reason = "indexing" if busy else ""
            return {"status": "BUSY" if busy else "READY", "reason": reason, "index_len": indexed}

    def table(self, name: str, filters: Sequence[Mapping[str, Any]], *, indexed: bool = False) -> pa.Table:
        """Rows that pass all filters, by the newest schema; `indexed` ones only for a search."""
        with self.lock:
            kept = self.find(name)
            batches = kept.batches[: kept.indexed] if indexed else list(kept.batches)
            schema, deleted = kept.schema, list(kept.deleted)
        tables = [pa.Table.from_batches([b]) for b in batches]
        table = pa.concat_tables([schema.empty_table(), *tables], promote_options="default")
        for f in filters:
            table = table.filter(_mask(table, f))
        if deleted and "id" in table.column_names:
            table = table.filter(pc.invert(pc.is_in(table["id"].cast(pa.string()), pa.array(deleted))))
        return table

    def search(self, key: bytes, body: Mapping[str, Any]) -> pa.Table:
        """Nearest rows as (id uint64, score float32). The answer to the same question is kept for a minute."""
        with self.lock:
            when, answer = self._answers.get(key, (0.0, None))
            if answer is not None and time.monotonic() - when < CACHE_SECONDS:
                return answer
        name, k = str(body.get("dataset", "")), body.get("k")
        if not isinstance(k, int) or k < 1:
            raise RequestError(f"k is {k!r}, wanted at least 1")
        kept = self.find(name)
        query = np.asarray(body.get("vector", []), np.float32)
        if query.shape != (kept.dim,):
            raise RequestError(f"dimension mismatch: the query has {query.size}, {name} has {kept.dim}")
        table = self.table(name, body.get("filters") or [], indexed=True)
        found = _nearest(table, query, k, kept.metric, kept.dim)
        with self.lock:
            self._answers[key] = time.monotonic(), found
        return found

    def _index(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
            if self.index_seconds:
                time.sleep(self.index_seconds)
            with self._wake:
                self._waiting.popleft().indexed += 1


def _mask(table: pa.Table, f: Mapping[str, Any]) -> Any:
    name, operator = f.get("field"), f.get("operator", f.get("op"))
    if name not in table.column_names or operator not in OPERATORS:
        raise RequestError(f"bad filter: {name} {operator}")
    column = table[name]
    try:
        return OPERATORS[operator](column, pa.scalar(str(f.get("value"))).cast(column.type))
    except pa.ArrowException as error:
        raise RequestError(f"bad filter value for {name}: {error}") from None


def _nearest(table: pa.Table, query: Array, k: int, metric: str, dim: int) -> pa.Table:
    chunks = table["vector"].combine_chunks()
    chunks = chunks if isinstance(chunks, pa.Array) else chunks.combine_chunks()
    vectors = np.asarray(chunks.flatten().to_numpy(zero_copy_only=False), np.float32).reshape(-1, dim)
    if metric == "euclidean":
        scores = np.sqrt(((vectors - query) ** 2).sum(1))
    else:
        products = vectors @ query
        lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
        scores = -products if metric == "dot_product" else 1 - products / np.maximum(lengths, 1e-30)
    order = np.argsort(scores, kind="stable")[:k]
    return pa.table({"id": _result_ids(table)[order], "score": scores[order].astype(np.float32)})


def _result_ids(table: pa.Table) -> Array:
    """Numeric ids cut to 32 bits; internal row numbers where ids are other texts, or missing."""
    rows = np.arange(table.num_rows, dtype=np.uint64)
    if "id" not in table.column_names:
        return rows
    try:
        ids = table["id"].cast(pa.int64()).to_numpy()
    except pa.ArrowException:
        return rows
    cut: Array = ids.astype(np.uint64) & np.uint64(0xFFFFFFFF)
    return cut
