"""Record batches of vectors: no copy, and every mismatch refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quarrel.errors import RequestError
from quarrel.flight import vector_batch
from tests.flight.stores import some_vectors


def test_the_vectors_are_not_copied() -> None:
    vectors = some_vectors(100, 24)
    batch = vector_batch(range(100), vectors)
    assert batch.column("vector").flatten().buffers()[1].address == vectors.ctypes.data
    part = batch.slice(40, 20)
    assert part.column("vector").flatten().buffers()[1].address == vectors.ctypes.data
    assert np.array_equal(np.stack(part.column("vector").to_numpy(zero_copy_only=False)), vectors[40:60])


def test_the_schema_is_longbows() -> None:
    batch = vector_batch([0, 2**32 - 1], some_vectors(2), doc_ids=["a", "b"], columns={"n": [1, 2]}, metric="dot_product")
    assert batch.schema.metadata == {b"longbow.metric": b"dot_product"}
    assert {f.name: str(f.type) for f in batch.schema} == {
        "id": "int64",
        "doc_id": "string",
        "vector": "fixed_size_list<item: float>[16]",
        "n": "int64",
    }
    assert vector_batch([], np.empty((0, 4), np.float32)).num_rows == 0


def test_normalised_vectors_are_a_copy_of_length_1() -> None:
    vectors = some_vectors(5) * np.float32(1e18)
    batch = vector_batch(range(5), vectors, normalize=True)
    rows = np.stack(batch.column("vector").to_numpy(zero_copy_only=False))
    assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    assert vectors[0, 0] == some_vectors(5)[0, 0] * np.float32(1e18)


V = some_vectors(2)


@pytest.mark.parametrize(
    ("ids", "vectors", "options", "said"),
    [
        ([1, 2], V.astype(np.float64), {}, r"vectors are float64 \[2, 16\], wanted a float32 array \[rows, dim\]"),
        ([1, 2], V.tolist(), {}, "vectors are list"),
        ([1, 2], V[0], {}, r"vectors are float32 \[16\]"),
        ([1, 2], V[:, ::2], {}, "not contiguous"),
        ([1, 2], V.T.copy().T, {}, "not contiguous"),
        ([1, 2], np.empty((2, 0), np.float32), {}, "at least one number"),
        ([1, 2], np.array([[1, 2], [np.inf, 1]], np.float32), {}, "vector 1 is not finite"),
        ([1], V, {}, "there are 1 ids for 2 vectors"),
        ([1, 2**32], V, {}, "an id is 4294967296, wanted 0 to 4294967295: searches return ids cut to 32 bits"),
        ([-1, 2], V, {}, "an id is -1"),
        ([1.5, 2], V, {}, "ids are float64"),
        (["a", "b"], V, {}, "wanted whole numbers"),
        ([1, 2], V * np.float32([[1], [0]]), {"normalize": True}, "vector 1 is zero and has no direction to normalise"),
        ([1, 2], V, {"metric": "l2"}, "metric is 'l2', wanted one of cosine, dot_product, euclidean"),
        ([1, 2], V, {"doc_ids": ["a"]}, "column doc_id has 1 values for 2 vectors"),
        ([1, 2], V, {"doc_ids": [1, 2]}, "column doc_id is no Arrow column"),
        ([1, 2], V, {"columns": {"vector": [1, 2]}}, "a column is called 'vector', which has another meaning"),
        ([1, 2], V, {"columns": {"x": [1, "a"]}}, "column x is no Arrow column"),
        ([1, 2], V, {"columns": {"x": pa.array([1])}}, "column x has 1 values"),
        ([1, 2], V, {"timestamps": ["now", "then"]}, "column timestamp is no Arrow column"),
    ],
)
def test_what_does_not_fit_is_refused(ids: Any, vectors: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        vector_batch(ids, vectors, **options)
