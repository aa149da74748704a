"""Where batches go: a Longbow store, or an Arrow or Parquet file. Each says how many rows are safe there."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from quarrel.errors import FlightDataError, FlightUnavailable, RequestError
from quarrel.flight import LongbowClient

STREAM_SECONDS = 10.0
"""How long one exchange stays open."""
PATIENCE = 60.0
"""Seconds without an acknowledged row until an unreachable server is an error."""
PAUSE = 0.1
"""Seconds before a broken exchange is begun again, doubled up to 2."""
PART_ROWS = 16384
ALL_IDS = 1 << 32
"""Above the largest id."""
FILES = (".parquet", ".arrow", ".feather")


class Sink(Protocol):
    """Rows have consecutive ids. `begin`: how many the checkpoint knows of, and whether there was a checkpoint."""

    safe: int
    target: str
    """What is filled, which two runs must not do at once."""

    def begin(self, sent: int, resumed: bool) -> None: ...

    def verify(self, sent: int) -> None:
        """That what an earlier run finished with is still there."""

    def write(self, batches: Iterator[pa.RecordBatch], progressed: Callable[[], None]) -> None:
        """Sends all; calls `progressed` on the same thread now and then."""

    def finish(self) -> None:
        """Everything is in place when this returns."""

    def tidy(self) -> None:
        """Removes what was needed to resume."""


@dataclass
class _Sent:
    """A batch that was not acknowledged yet. `end`: how many rows are safe once it is."""

    batch: pa.RecordBatch
    end: int


class FlightSink:
    """A dataset of a store. Batches are kept until they are acknowledged; after a break the server lists the ids it has.

    patience: seconds that a server may be away."""

    def __init__(self, client: LongbowClient, dataset: str, first_id: int, patience: float = PATIENCE) -> None:
        self._client, self._dataset, self._first, self._patience = client, dataset, first_id, patience
        self.target = f"{dataset} at {_place(client.address)}"
        self.safe = 0
        self.present = 0
        self._again: list[tuple[int, int]] = []
        self._open: deque[_Sent] = deque()
        self._there: set[int] = set()
        self._away: float | None = None

    def begin(self, sent: int, resumed: bool) -> None:
        self.safe = sent
        self._there = self._ids()
        if self._there and not resumed:
            raise RequestError(
                f"{self._dataset} holds ids from {self._first} on and there is no checkpoint of this run: give --first-id"
                f" {max(self._there) + 1} or another --dataset, or delete it first"
            )

    def verify(self, sent: int) -> None:
        self.safe = sent
        self._ids()

    def write(self, batches: Iterator[pa.RecordBatch], progressed: Callable[[], None]) -> None:
        source, pause, doubt = _Peek(batches), PAUSE, False
        while self._open or not source.over():
            try:
                if doubt:
                    self._reconcile()
                    doubt = False
                self._client.ingest(self._dataset, self._outgoing(source, progressed), acked=self._acked)
                pause = PAUSE
            except (FlightUnavailable, FlightDataError):
                # A break in mid-stream looks like either; the server says what arrived, so nothing is sent twice.
                progressed()
                now = time.monotonic()
                self._away = self._away or now
                if now - self._away > self._patience:
                    raise
                time.sleep(pause)
                pause, doubt = min(2.0, pause * 2), True
            progressed()

    def finish(self) -> None:
        """All rows are acknowledged. What was sent again after a break is looked at once more: a store that let a batch
        time out may have taken it after all."""
        if self._again:
            low, high = min(low for low, _ in self._again), max(high for _, high in self._again)
            ids = self._client.counts(self._dataset, low, high)
            if twice := sorted(id for id, n in ids.items() if n > 1):
                raise FlightDataError(
                    f"{self._dataset} has {len(twice)} ids twice, from {twice[0]} to {twice[-1]}: the store took a batch"
                    " that it had let time out; delete the dataset and the checkpoint, and begin again in a store with room"
                )

    def tidy(self) -> None:
        """There is nothing to remove."""

    def _outgoing(self, source: _Peek, progressed: Callable[[], None]) -> Iterator[pa.RecordBatch]:
        """What was not acknowledged, then what is new, for a while."""
        end = time.monotonic() + STREAM_SECONDS
        again = [sent.batch for sent in self._open]
        yield from again
        while time.monotonic() < end and (batch := source.next()) is not None:
            missing = self._missing(batch)
            self.present += batch.num_rows - missing.num_rows
            self._queue(self._open, missing, int(batch.column("id")[-1].as_py()) + 1 - self._first)
            if missing.num_rows:
                yield missing
            progressed()

    def _queue(self, to: deque[_Sent], missing: pa.RecordBatch, end: int) -> None:
        """Rows that are there already are safe with those before them."""
        if missing.num_rows:
            to.append(_Sent(missing, end))
        elif to:
            to[-1].end = end
        else:
            self.safe = end

    def _missing(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that the server does not have."""
        if not self._there:
            return batch
        keep = [id not in self._there for id in batch.column("id").to_pylist()]
        return batch.filter(pa.array(keep, pa.bool_()))

    def _acked(self, rows: int) -> None:
        self.safe = self._open.popleft().end
        self._away = None

    def _reconcile(self) -> None:
        """Drops batches that arrived without an acknowledgement."""
        self._there = self._ids()
        left: deque[_Sent] = deque()
        for sent in self._open:
            self._queue(left, self._missing(sent.batch), sent.end)
        self._open = left
        if left:
            low, last = (ids[i].as_py() for ids, i in ((left[0].batch["id"], 0), (left[-1].batch["id"], -1)))
            self._again.append((low, last + 1))

    def _ids(self) -> set[int]:
        """Ids of this run that the server has and the checkpoint does not know of. They are read at once: that rows are
        there does not wait for the index. FlightDataError where the last row that the checkpoint knows of is not."""
        low = self._first + self.safe
        there = self._client.ids(self._dataset, low - bool(self.safe), ALL_IDS)
        if low - 1 in there or not self.safe:
            return there - {low - 1}
        raise FlightDataError(
            f"{self._dataset} lacks id {low - 1}, the last of {self.safe} vectors that were acknowledged: the store has"
            " lost rows, or they were deleted; delete the dataset and the checkpoint to begin again"
        )


def _place(address: str) -> str:
    """Host and port; this machine has several names for itself."""
    place = address.partition("://")[2].rstrip("/").lower()
    for name in ("localhost", "[::1]"):
        place = place.replace(f"{name}:", "127.0.0.1:") if place.startswith(f"{name}:") else place
    return place


class _Peek:
    """An iterator that knows whether it is over."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._next: pa.RecordBatch | None = None
        self._over = False

    def next(self) -> pa.RecordBatch | None:
        if self._next is not None:
            batch, self._next = self._next, None
            return batch
        batch = None if self._over else next(self._batches, None)
        self._over = batch is None
        return batch

    def over(self) -> bool:
        if self._next is None and not self._over:
            self._next = self.next()
        return self._next is None


class FileSink:
    """One file, written in parts that a broken run leaves whole; they are joined at the end."""

    def __init__(self, path: Path) -> None:
        self._path, self._parts = path, path.with_name(f"{path.name}.parts")
        self.target = str(path.resolve())
        self.safe = 0

    def begin(self, sent: int, resumed: bool) -> None:
        if self._path.exists() and not resumed:
            raise RequestError(f"{self._path} exists and there is no checkpoint of this run: move it away, or name another")
        self._parts.mkdir(parents=True, exist_ok=True)
        self.safe = sent
        for part in self._parts.iterdir():
            if not part.stem.isdigit() or int(part.stem) >= sent:
                part.unlink()

    def verify(self, sent: int) -> None:
        if sent and not self._path.exists():
            raise RequestError(f"{self._path} was finished and is gone: delete the checkpoint of its run to begin again")

    def write(self, batches: Iterator[pa.RecordBatch], progressed: Callable[[], None]) -> None:
        batches_of_part: list[pa.RecordBatch] = []
        for batch in batches:
            batches_of_part.append(batch)
            if sum(b.num_rows for b in batches_of_part) >= PART_ROWS:
                self._part(batches_of_part)
                batches_of_part = []
                progressed()
        if batches_of_part:
            self._part(batches_of_part)
        progressed()

    def finish(self) -> None:
        temporary = self._path.with_name(f"{self._path.name}.new")
        writer: Any = None
        for part in sorted(self._parts.iterdir()):
            with pa.OSFile(str(part)) as file, pa.ipc.open_file(file) as reader:
                if writer is None:
                    writer = file_writer(temporary, self._path.suffix, reader.schema)
                for i in range(reader.num_record_batches):
                    writer.write_batch(reader.get_batch(i))
        if writer is None:
            return  # no row was good
        writer.close()
        temporary.replace(self._path)

    def tidy(self) -> None:
        for part in self._parts.iterdir():
            part.unlink()
        self._parts.rmdir()

    def _part(self, batches: list[pa.RecordBatch]) -> None:
        path = self._parts / f"{self.safe:012d}.arrow"
        temporary = path.with_suffix(".new")
        with temporary.open("wb") as file:
            with pa.ipc.new_file(file, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self.safe += sum(b.num_rows for b in batches)


def file_writer(path: Path, suffix: str, schema: pa.Schema) -> Any:
    """Writes batches to a file of the kind that a suffix of `FILES` names; a context manager."""
    return pq.ParquetWriter(path, schema) if suffix.lower() == ".parquet" else pa.ipc.new_file(path, schema)
