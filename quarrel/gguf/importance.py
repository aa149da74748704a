"""Importance matrices, as llama.cpp's `llama-imatrix` writes them: how much each column of a model's maps is used.

Per map, and per expert of it, the sums of the squares of what came in, column by column, and how many rows those were. The
GGUF form has tensors `NAME.in_sum2` and `NAME.counts`; the older one, `.dat`, is a list of names and means.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quarrel.errors import GGUFError, ModelError, RequestError
from quarrel.gguf.file import GGUFFile
from quarrel.gguf.header import MAGIC
from quarrel.gguf.values import ValueType
from quarrel.gguf.writer import GGUFWriter

MAX_NAME = 1 << 10
MAX_TEXT = 1 << 16
SUMS, COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class Entry:
    """One map's: `sums` [maps, k] of squares, `counts` [maps] of rows; one map of a dense tensor, else one an expert."""

    sums: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class ImportanceMatrix:
    """By names of tensors. `chunks` of `chunk_size` tokens of the texts `datasets` went through the model."""

    entries: Mapping[str, Entry]
    chunks: int = 0
    chunk_size: int = 0
    datasets: tuple[str, ...] = ()
    note: str = field(default="", compare=False)
    """What it was made of, in the words of its maker."""

    def means(self, name: str, maps: int, k: int) -> np.ndarray | None:
        """Mean squares [maps, k]; ones for an expert that no token chose, None for a map that was not looked at.

        Raises RequestError for another size: the matrix belongs to another model.
        """
        found = self.entries.get(name)
        if found is None:
            return None
        if found.sums.size != maps * k or len(found.counts) not in (1, maps):
            wanted = f"{k} columns" if maps == 1 else f"{maps} times {k} columns"
            raise RequestError(
                f"the importance matrix has {found.sums.size} values for {name}, which has {wanted}: it was made of another"
                " model"
            )
        counts = np.broadcast_to(found.counts[:, None], (maps, 1))
        means: np.ndarray = np.divide(found.sums.reshape(maps, k), counts, out=np.ones((maps, k)), where=counts > 0)
        return means.astype(np.float32, copy=False)

    def write(self, path: Path) -> None:
        """As GGUF; the file appears when it is whole."""
        writer = GGUFWriter()
        writer.add("general.type", "imatrix")
        writer.add("imatrix.datasets", self.datasets, ValueType.STRING)
        writer.add("imatrix.chunk_count", self.chunks)
        writer.add("imatrix.chunk_size", self.chunk_size)
        if self.note:
            writer.add("quarrel.imatrix.note", self.note)
        for name in sorted(self.entries):
            entry = self.entries[name]
            writer.add_tensor(f"{name}{SUMS}", entry.sums.astype(np.float32).reshape(len(entry.counts), -1))
            writer.add_tensor(f"{name}{COUNTS}", entry.counts.astype(np.float32).reshape(-1, 1))
        writer.write(path)


def read_importance(path: str | os.PathLike[str]) -> ImportanceMatrix:
    """A file in either form. Raises RequestError for none, GGUFError for one that is not sound."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            found = _gguf(path) if magic == MAGIC else _dat(path.read_bytes())
    except OSError as error:
        raise RequestError(f"the importance matrix {path} cannot be read: {error.strerror}", "imatrix") from None
    except ModelError as error:
        said = str(error).removeprefix(f"{path}: ")
        raise GGUFError(f"the importance matrix {path} is not sound: {said}") from None
    if not found.entries:
        raise GGUFError(f"the importance matrix {path} is empty: make it again with `quarrel imatrix`")
    for name, entry in found.entries.items():
        for values in (entry.sums, entry.counts):
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise GGUFError(
                    f"the importance matrix {path} has NaN, infinite or negative values for {name}: make it again"
                )
    return found


def _gguf(path: Path) -> ImportanceMatrix:
    with GGUFFile.open(path) as file:
        if (kind := file.metadata.str("general.type", "model")) != "imatrix":
            raise GGUFError(f"it is a {kind[:40]}, wanted what `quarrel imatrix` writes")
        entries = {}
        for name in file.tensors:
            if name.endswith(SUMS):
                base = name.removesuffix(SUMS)
                if f"{base}{COUNTS}" not in file.tensors:
                    raise GGUFError(f"it has no counts for {base}")
                counts = file.array(f"{base}{COUNTS}").reshape(-1).astype(np.float64)
                sums = file.array(name)
                if sums.size % max(1, counts.size):
                    raise GGUFError(f"it has {counts.size} counts for {sums.size} values of {base}")
                entries[base] = Entry(sums.reshape(counts.size, -1), counts)
        keys = file.metadata
        return ImportanceMatrix(
            entries,
            keys.int("imatrix.chunk_count", 0, lo=0),
            keys.int("imatrix.chunk_size", 0, lo=0),
            tuple(keys.strs("imatrix.datasets")) if "imatrix.datasets" in keys else (),
            keys.str("quarrel.imatrix.note", ""),
        )


def _dat(data: bytes) -> ImportanceMatrix:
    """Entries of a name, how many chunks were added up, and values; then chunks in all and the text's name."""
    at = 0

    def integer(what: str, low: int, high: int) -> int:
        nonlocal at
        if at + 4 > len(data):
            raise GGUFError(f"it ends where {what} should be: it is cut short, or no importance matrix")
        value: int = struct.unpack_from("<i", data, at)[0]
        if not low <= value <= high:
            raise GGUFError(f"{what} is {value}, which makes no sense: it is no importance matrix, or damaged")
        at += 4
        return value

    def take(count: int) -> bytes:
        nonlocal at
        if at + count > len(data):
            raise GGUFError("it ends in the middle of an entry: it is cut short")
        at += count
        return data[at - count : at]

    entries = {}
    for _ in range(integer("the number of entries", 1, 1 << 20)):
        name = take(integer("the length of a name", 1, MAX_NAME)).decode("utf-8", "replace")
        calls = integer("the number of chunks", -(1 << 31), (1 << 31) - 1)
        values = np.frombuffer(take(4 * integer("the number of values", 1, 1 << 28)), "<f4").astype(np.float64)
        entries[name] = Entry(values[None] / max(calls, 1), np.ones(1))
    if at == len(data):
        return ImportanceMatrix(entries)
    chunks = integer("the number of chunks", 0, (1 << 31) - 1)
    text = take(integer("the length of the text's name", 0, MAX_TEXT)).decode("utf-8", "replace")
    return ImportanceMatrix(entries, chunks, 0, (text,) if text else ())
