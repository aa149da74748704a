"""Measures that Longbow keeps and does not rank by: exact scores here, and a warning where an order is another."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quarrel.errors import FlightDataError, OptionWarning
from quarrel.flight.results import Hits
from quarrel.flight.rows import METRIC_KEY, vector_field

Array = npt.NDArray[Any]
Measure = Literal["cosine", "dot_product"]
MEASURES: tuple[Measure, ...] = ("cosine", "dot_product")

SAME = 5e-3
"""Relative difference up to which lengths, or scores, count as the same."""


@dataclass(frozen=True)
class Uneven:
    """Rows whose order by `measure` is not their order by L2: their lengths differ."""

    measure: str
    shortest: float
    longest: float


def uneven(batch: pa.RecordBatch) -> Uneven | None:
    """What a batch asks for that a store which ranks by L2 would answer wrongly."""
    measure = (batch.schema.metadata or {}).get(METRIC_KEY, b"").decode("utf-8", "replace")
    if measure not in MEASURES or not batch.num_rows:
        return None
    lengths = np.linalg.norm(vectors_of(batch), axis=1)
    shortest, longest = float(lengths.min()), float(lengths.max())
    return Uneven(measure, shortest, longest) if longest - shortest > SAME * longest else None


def warn_of(dataset: str, wants: Uneven, address: str) -> None:
    """That the order of what was found is by L2."""
    advice = f"search with rerank={wants.measure!r}"
    if wants.measure == "cosine":
        advice = f"fill it with vectors of length 1 (vector_batch(normalize=True)), or {advice}"
    warnings.warn(
        OptionWarning(
            f"{dataset} asks for {wants.measure} and the store at {address} ranks by L2, which is another order for its"
            f" vectors, of lengths {wants.shortest:.3g} to {wants.longest:.3g}: {advice}",
            "metric",
        ),
        stacklevel=4,
    )


def is_l2(hits: Hits, query: Array, fetch: Callable[[int], Array]) -> bool:
    """Whether the score of the first hit is 1 / (1 + L2): `fetch` gives vectors `[n, dim]` of the rows with an id."""
    if not len(hits):
        return False
    scores = 1 / (1 + np.linalg.norm(fetch(int(hits.ids[0])) - query, axis=1))
    return bool(np.isclose(scores, float(hits.scores[0]), rtol=SAME).any())


def ranked(ids: Array, vectors: Array, query: Array, measure: Measure, k: int) -> Hits:
    """The `k` best of rows `[n]`, `[n, dim]` by a measure, in float64."""
    rows, q = vectors.astype(np.float64), query.astype(np.float64)
    products = rows @ q
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(q)
    cosines = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    scores = cosines if measure == "cosine" else products
    best = np.argsort(-scores, kind="stable")[:k]
    distances = np.linalg.norm(rows[best] - q, axis=1)
    floats = (scores[best].astype(np.float32), distances.astype(np.float32), cosines[best].astype(np.float32))
    return Hits(ids[best].astype(np.uint64), *floats, by=measure)


def vectors_of(batch: pa.RecordBatch) -> Array:
    """The column vector of a sound batch, `[rows, dim]`."""
    kind, dim = vector_field(batch.schema)
    column = batch.column(batch.schema.get_field_index("vector"))
    flat = column.flatten()
    if column.null_count or flat.null_count or not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise FlightDataError(f"the column vector is {kind} with {column.null_count} nulls, wanted numbers in each row")
    values: Array = flat.to_numpy(zero_copy_only=False).reshape(-1, dim)
    return values
