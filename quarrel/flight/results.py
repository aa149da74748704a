"""What calls return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import flight

from quarrel.errors import FlightDataError
from quarrel.flight.rows import numbers

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Hits:
    """Nearest first, all arrays `[n]`.

    ids: uint64, which Longbow cuts to 32 bits. scores: float32, larger is nearer: by "l2" 1 / (1 + distance), which is all
    that Longbow has; by "cosine" and "dot_product" that measure itself, of the rows as they are. distances: float32, L2,
    and NaN where the server's score is no such number. cosines: float32; by "l2" they are computed from the distance for
    rows of length 1, and NaN where a row cannot be that.
    """

    ids: Array
    scores: Array
    distances: Array
    cosines: Array
    by: Literal["l2", "cosine", "dot_product"] = "l2"

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, k: int) -> Hits:
        """The nearest `k`."""
        return Hits(self.ids[:k], self.scores[:k], self.distances[:k], self.cosines[:k], self.by)


@dataclass(frozen=True)
class Dataset:
    """What GetFlightInfo tells. Longbow counts record batches, not rows, and gives neither schema nor endpoints."""

    name: str
    batches: int
    nbytes: int


@dataclass(frozen=True)
class Readiness:
    """`indexed`: rows that a search sees. While anything is being indexed, Longbow says BUSY of every name: whether a
    dataset is there, `exists` tells."""

    status: Literal["READY", "BUSY", "NOT_FOUND"]
    indexed: int
    reason: str = ""


def hits_by_l2(ids: Array, scores: Array, length: float = 1.0) -> Hits:
    """Hits of a store that ranks by L2. length: of the vector that was searched by."""
    with np.errstate(divide="ignore", invalid="ignore"):
        given = scores.astype(np.float64)
        sound = (given > 0) & (given < 1 + SLACK)
        if (np.diff(given[sound]) > SLACK).any():  # nearest first, they are a distance of the server's own
            sound[:] = False
        distances = np.where(sound, np.maximum(1 / given - 1, 0), np.nan)
        cosines = (length**2 + 1 - distances**2) / (2 * length)
        cosines = np.where(np.abs(cosines) < 1 + SLACK, np.clip(cosines, -1, 1), np.nan)
    return Hits(ids, scores, distances.astype(np.float32), cosines.astype(np.float32))


def hits_by_id(said: Mapping[str, Any]) -> Hits:
    """The answer of VectorSearchByID."""
    by_name = {key.lower(): value for key, value in said.items()}
    ids, scores = (by_name.get(key) or [] for key in ("ids", "scores"))
    try:
        return hits_by_l2(np.array(ids, np.uint64), np.array(scores, np.float32).reshape(len(ids)))
    except (ValueError, TypeError, OverflowError):
        found = str(said)[:120]
        raise FlightDataError(f"the server's answer to VectorSearchByID is {found}, wanted ids and scores") from None


def hits_of(batches: Iterator[pa.RecordBatch], query: Array) -> Hits:
    """The batches of a search by `query`."""
    ids, scores = [np.empty(0, np.uint64)], [np.empty(0, np.float32)]
    for batch in batches:
        ids.append(numbers(batch, "id", pa.uint64()))
        scores.append(numbers(batch, "score", pa.float32()))
    return hits_by_l2(np.concatenate(ids), np.concatenate(scores), float(np.linalg.norm(query)))


def dataset_of(info: flight.FlightInfo, name: str | None) -> Dataset:
    path = [part.decode("utf-8", "replace") for part in (info.descriptor.path or [])]
    return Dataset(name or "/".join(path), int(info.total_records), int(info.total_bytes))


SLACK = 1e-3
"""What rounding may add to a 1."""
