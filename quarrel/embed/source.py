"""Rows of a text, JSON lines, CSV or Parquet file, one after the other; a bad row is reported and skipped."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from quarrel.errors import RequestError

MAX_LINE = 16 << 20
"""Bytes of a line; a longer one is a bad row."""
PARQUET_ROWS = 1024
SUFFIXES = (".txt", ".jsonl", ".ndjson", ".csv", ".parquet")


@dataclass(frozen=True)
class Row:
    """`number` counts from 0 over all rows, bad ones included. `fault` says what is wrong with it; `text` is then what
    can be shown. `position`: how much of the file is read, in the source's unit."""

    number: int
    text: str
    position: int
    doc_id: str | None = None
    columns: dict[str, str | None] = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True)
class Wanted:
    """Which columns of a row become what. `text` is ignored for .txt files, whose lines are the texts."""

    text: str = "text"
    id: str | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A file to read. `total`: its size, in bytes or (Parquet) rows."""

    path: Path
    wanted: Wanted
    kind: str
    total: int

    @property
    def unit(self) -> str:
        return "row" if self.kind == ".parquet" else "B"

    def rows(self) -> Iterator[Row]:
        """All rows. Raises RequestError where the file itself is unusable."""
        if self.kind == ".parquet":
            yield from _parquet(self.path, self.wanted)
            return
        with self.path.open("rb") as file:
            if self.kind == ".csv":
                yield from _csv(file, self.wanted, self.path)
            elif self.kind == ".txt":
                yield from _txt(file)
            else:
                yield from _jsonl(file, self.wanted)


def open_source(name: str, wanted: Wanted) -> Source:
    """The file, known by its ending. Raises RequestError for others, and for columns that a Parquet file lacks."""
    path = Path(name).expanduser()
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise RequestError(f"the input is {path.name!r}, wanted a file that ends in {', '.join(SUFFIXES)}")
    if kind == ".parquet":
        return Source(path, wanted, kind, _parquet_rows(path, wanted))
    return Source(path, wanted, kind, path.stat().st_size)


def _lines(file: BinaryIO) -> Iterator[tuple[bytes | None, int]]:
    """Lines without their ends, and how many bytes are read; None for one that is too long."""
    position = 0
    while line := file.readline(MAX_LINE + 1):
        position += len(line)
        if len(line) <= MAX_LINE:
            yield line.rstrip(b"\r\n"), position
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE)
            position += len(line)
        yield None, position


def _txt(file: BinaryIO) -> Iterator[Row]:
    """A text a line; empty lines only separate."""
    number = 0
    for line, position in _lines(file):
        if line is None:
            yield Row(number, "", position, fault=f"the line is longer than {MAX_LINE} bytes")
        elif not line.strip():
            continue
        else:
            text, fault = _decoded(line)
            yield Row(number, text, position, fault=fault)
        number += 1


def _jsonl(file: BinaryIO, wanted: Wanted) -> Iterator[Row]:
    number = 0
    for line, position in _lines(file):
        if line is None:
            yield Row(number, "", position, fault=f"the line is longer than {MAX_LINE} bytes")
        elif not line.strip():
            continue
        else:
            text, fault = _decoded(line)
            record: Any = None
            if fault is None:
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError) as error:
                    fault = f"it is no JSON: {str(error)[:80]}"
                else:
                    fault = None if isinstance(record, dict) else f"it is a JSON {type(record).__name__}, wanted an object"
            yield _row(number, record, wanted, position) if fault is None else Row(number, text, position, fault=fault)
        number += 1


def _csv(file: BinaryIO, wanted: Wanted, path: Path) -> Iterator[Row]:
    csv.field_size_limit(MAX_LINE)
    position = 0

    def texts() -> Iterator[str]:
        nonlocal position
        for raw in file:
            position += len(raw)
            yield raw.decode("utf-8-sig" if position == len(raw) else "utf-8", "surrogateescape")

    reader = csv.reader(texts())
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise RequestError(f"{path} has no header that can be read ({error}); wanted one line of column names") from None
    _need(header, wanted, path)
    number = 0
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield Row(number, "", position, fault=f"it is no CSV: {error}")
            number += 1
            continue
        if cells is None:
            return
        if not cells:
            continue
        if len(cells) != len(header):
            yield Row(number, ",".join(cells), position, fault=f"it has {len(cells)} cells, wanted {len(header)}")
        else:
            yield _row(number, dict(zip(header, cells)), wanted, position)
        number += 1


def _parquet_rows(path: Path, wanted: Wanted) -> int:
    from quarrel.flight.requirement import need_arrow

    need_arrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _need(file.schema_arrow.names, wanted, path)
            return int(file.metadata.num_rows)
    except pa.ArrowException as error:
        raise RequestError(f"{path} is no Parquet file that can be read: {str(error).splitlines()[0]}") from None


def _parquet(path: Path, wanted: Wanted) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(n for n in (wanted.text, wanted.id, *wanted.others) if n is not None))
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(PARQUET_ROWS, columns=names):
                batch.validate(full=True)
                for record in batch.to_pylist():
                    yield _row(number, record, wanted, number + 1)
                    number += 1
    except pa.ArrowException as error:
        raise RequestError(f"{path} cannot be read behind row {number}: {str(error).splitlines()[0]}") from None


def _need(names: Sequence[str], wanted: Wanted, path: Path) -> None:
    for name in (wanted.text, wanted.id, *wanted.others):
        if name is not None and name not in names:
            raise RequestError(f"{path} has no column {name!r}; it has {', '.join(map(str, names))}")


def _decoded(line: bytes) -> tuple[str, str | None]:
    try:
        return line.decode("utf-8"), None
    except UnicodeDecodeError as error:
        return line.decode("utf-8", "replace"), f"it is not UTF-8 at byte {error.start}"


def _row(number: int, record: dict[str, Any], wanted: Wanted, position: int) -> Row:
    text = record.get(wanted.text)
    fault = None
    if not isinstance(text, str):
        found = "null" if text is None else type(text).__name__
        fault = f"its {wanted.text} is {found if wanted.text in record else 'missing'}, wanted a text"
    elif not text.strip():
        fault = f"its {wanted.text} is empty"
    elif not text.isascii() and not _is_unicode(text):
        fault = f"its {wanted.text} is not UTF-8"
    doc_id = None
    if wanted.id is not None:
        doc_id = _as_text(record.get(wanted.id))
        fault = fault or (f"its {wanted.id} is missing or null, wanted an id" if doc_id is None else None)
    columns = {name: _as_text(record.get(name)) for name in wanted.others}
    shown = text if isinstance(text, str) else json.dumps(record, default=str)
    return Row(number, shown, position, doc_id, columns, fault)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_text(value: Any) -> str | None:
    """Any value of a column as text: metadata columns have one type, whatever the row."""
    if value is None or isinstance(value, str):
        return value if value is None else value.encode("utf-8", "replace").decode()
    return json.dumps(value, default=str)
