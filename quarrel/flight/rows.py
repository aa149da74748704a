"""Vectors as record batches, without copying them, and batches from strangers, checked before anybody looks inside."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quarrel.errors import FlightDataError, RequestError

Array = npt.NDArray[Any]
Metric = Literal["cosine", "dot_product", "euclidean"]
METRICS: tuple[Metric, ...] = ("cosine", "dot_product", "euclidean")

METRIC_KEY = b"longbow.metric"
MAX_ID = (1 << 32) - 1
"""Search results carry ids cut to 32 bits: a larger one would come back as another row's."""
RESERVED = ("id", "doc_id", "vector", "timestamp")


def vector_batch(
    ids: Sequence[int] | Array,
    vectors: Array,
    *,
    doc_ids: Sequence[str] | None = None,
    timestamps: Array | None = None,
    columns: Mapping[str, Sequence[Any] | pa.Array] | None = None,
    metric: Metric = "cosine",
    normalize: bool = False,
) -> pa.RecordBatch:
    """Rows for `put`: int64 `id`, `vector` as FixedSizeList<float32>[dim] in the memory of `vectors`, and the rest.

    ids: 0 to 2^32 - 1. vectors: float32 `[n, dim]`, contiguous and finite. doc_ids: utf8. timestamps: datetime64. columns:
    further ones by name. metric: what Longbow notes, though it ranks by L2 whatever it says. normalize: a copy of the
    vectors, each divided by its length, which Longbow ranks as their cosines do. Raises RequestError for anything else.
    """
    if metric not in METRICS:
        raise RequestError(f"metric is {metric!r}, wanted one of {', '.join(METRICS)}")
    _check_vectors(vectors)
    vectors = _of_length_1(vectors) if normalize else vectors
    n, dim = vectors.shape
    arrays: dict[str, pa.Array] = {"id": pa.array(_checked_ids(ids, n))}
    if doc_ids is not None:
        arrays["doc_id"] = _column("doc_id", doc_ids, n, pa.string())
    flat = pa.Array.from_buffers(pa.float32(), n * dim, [None, pa.py_buffer(vectors)])
    arrays["vector"] = pa.FixedSizeListArray.from_arrays(flat, dim)
    if timestamps is not None:
        arrays["timestamp"] = _column("timestamp", timestamps, n, pa.timestamp("ns"))
    for name, values in (columns or {}).items():
        if name in RESERVED or not name:
            raise RequestError(f"a column is called {name!r}, which has another meaning; rename it")
        arrays[name] = _column(name, values, n, None)
    schema = pa.schema([(name, a.type) for name, a in arrays.items()], metadata={METRIC_KEY: metric.encode()})
    return pa.RecordBatch.from_arrays(list(arrays.values()), schema=schema)


def _check_vectors(vectors: object) -> None:
    if not isinstance(vectors, np.ndarray) or vectors.dtype != np.float32 or vectors.ndim != 2:
        found = f"{vectors.dtype} {list(vectors.shape)}" if isinstance(vectors, np.ndarray) else type(vectors).__name__
        raise RequestError(f"the vectors are {found}, wanted a float32 array [rows, dim]")
    if not vectors.flags.c_contiguous or not vectors.shape[1]:
        raise RequestError("the vectors are not contiguous rows of at least one number: pass np.ascontiguousarray(vectors)")
    if not np.isfinite(vectors).all():
        row = int(np.argmin(np.isfinite(vectors).all(axis=1)))
        raise RequestError(f"vector {row} is not finite, which no index can hold; leave it out")


def _of_length_1(vectors: Array) -> Array:
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    if not lengths.all():
        raise RequestError(f"vector {int(np.argmin(lengths))} is zero and has no direction to normalise; leave it out")
    return np.ascontiguousarray(vectors / lengths, np.float32)


def _checked_ids(ids: Sequence[int] | Array, n: int) -> Array:
    given = np.asarray(ids)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise RequestError(f"the ids are {given.dtype} {list(given.shape)}, wanted whole numbers, one a row")
    if len(given) != n:
        raise RequestError(f"there are {len(given)} ids for {n} vectors; give one for each")
    for id in (given.min(), given.max()) if n else ():
        if not 0 <= int(id) <= MAX_ID:
            raise RequestError(
                f"an id is {id}, wanted 0 to {MAX_ID}: searches return ids cut to 32 bits; put longer ones into doc_ids"
            )
    return given.astype(np.int64)


def _column(name: str, values: Any, n: int, kind: pa.DataType | None) -> pa.Array:
    try:
        array = values if isinstance(values, pa.Array) else pa.array(values, kind)
        array = array if kind is None or array.type == kind else array.cast(kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"the column {name} is no Arrow column: {first_line(error)}") from None
    if len(array) != n:
        raise RequestError(f"the column {name} has {len(array)} values for {n} vectors; give one for each")
    return array


def vector_field(schema: pa.Schema) -> tuple[pa.DataType, int]:
    """Element type and dimension of `vector`; FlightDataError where it is none."""
    index = schema.get_field_index("vector")
    kind = None if index < 0 else schema.field(index).type
    if kind is None or not pa.types.is_fixed_size_list(kind):
        raise FlightDataError(f"the column vector is {kind or 'missing'}, wanted a FixedSizeList of numbers")
    return kind.value_type, int(kind.list_size)


def validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, once every offset and length in it is checked; nothing may touch it before."""
    try:
        batch.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise FlightDataError(f"the server sent a batch that is not sound: {first_line(error)}") from None
    return batch


def numbers(batch: pa.RecordBatch, name: str, kind: pa.DataType) -> Array:
    """A column of a sound batch as an array; FlightDataError where it is missing, of another type, or holds nulls."""
    index = batch.schema.get_field_index(name)
    found = None if index < 0 else batch.schema.field(index).type
    if found != kind:
        raise FlightDataError(f"the server's column {name} is {found or 'missing'}, wanted {kind}")
    column = batch.column(index)
    if column.null_count:
        raise FlightDataError(f"the server's column {name} holds {column.null_count} nulls, wanted none")
    values: Array = column.to_numpy(zero_copy_only=False)
    return values


def query_vector(vector: Any) -> Array:
    """A vector to search by: float32 `[dim]`, finite."""
    given = np.asarray(vector)
    if given.ndim != 1 or not given.size or given.dtype.kind not in "fiu":
        raise RequestError(f"the vector to search by is {given.dtype} {list(given.shape)}, wanted numbers [dim]")
    floats = given.astype(np.float32)
    if not all(map(math.isfinite, floats.tolist())):
        raise RequestError("the vector to search by is not finite, so nothing is near it")
    return floats


_ADDED = re.compile(r"\.? (Detail: |gRPC client debug context: |Client context: )")
"""Where the library's own remarks begin, behind what the server said."""


def first_line(error: BaseException) -> str:
    """What a library said, without its remarks and its trailing stop."""
    text = str(error).strip().splitlines()
    return _ADDED.split(text[0] if text else type(error).__name__)[0].rstrip(".")[:300]


def from_server(error: BaseException) -> bool:
    """Whether an error of the library's is a server's answer, not a stream that could not be read."""
    return _ADDED.search(str(error)) is not None
