"""The local server's search: every row is looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Array = npt.NDArray[Any]


def nearest(table: pa.Table, query: Array, k: int, metric: str | None) -> pa.Table:
    """The k rows nearest to `query` (float32 [dim]) as (id uint64, score float32), nearest first.

    metric None: Longbow's score whatever a dataset's metric is, 1 / (1 + L2), larger is nearer. Otherwise a distance,
    smaller is nearer: L2, the negative product, or 1 - cosine.
    """
    chunks = table["vector"].combine_chunks()
    chunks = chunks if isinstance(chunks, pa.Array) else chunks.combine_chunks()
    vectors = np.asarray(chunks.flatten().to_numpy(zero_copy_only=False), np.float32).reshape(-1, len(query))
    if metric == "dot_product":
        distances = -(vectors @ query)
    elif metric == "cosine":
        lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
        distances = 1 - (vectors @ query) / np.maximum(lengths, 1e-30)
    else:
        distances = np.sqrt(((vectors - query) ** 2).sum(1))
    order = np.argsort(distances, kind="stable")[:k]
    scores = 1 / (1 + distances[order]) if metric is None else distances[order]
    return pa.table({"id": _result_ids(table)[order], "score": scores.astype(np.float32)})


def vector_of(table: pa.Table, id: str) -> Array | None:
    """The vector of the newest row with an id, float32 [dim]."""
    if "id" not in table.column_names:
        return None
    found = table.filter(pc.equal(table["id"].cast(pa.string()), id))["vector"]
    return np.asarray(found[-1].as_py(), np.float32) if len(found) else None


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
