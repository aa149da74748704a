"""What a client does with a store. The same tests run on a real Longbow: LONGBOW_ADDR=grpc://127.0.0.1:3000 pytest ..."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quarrel.errors import FlightDataError, FlightError, FlightUnavailable, RequestError
from quarrel.flight import LongbowClient, vector_batch
from quarrel.flight.streams import Caps
from tests.flight.stores import QUICK, REAL, a_name, a_store, some_vectors

only_standin = pytest.mark.skipif(bool(REAL), reason="about the stand-in, and LONGBOW_ADDR names a real store")


@pytest.fixture(scope="module")
def client() -> Iterator[LongbowClient]:
    with a_store() as made:
        yield made


@pytest.fixture
def dataset(client: LongbowClient) -> Iterator[str]:
    """A name, whose dataset is deleted afterwards."""
    name = a_name()
    yield name
    if client.readiness(name).status != "NOT_FOUND":
        client.delete(name)


def slices(batch: pa.RecordBatch, size: int) -> list[pa.RecordBatch]:
    return [batch.slice(i, size) for i in range(0, batch.num_rows, size)]


@pytest.mark.parametrize("way", ["put", "ingest"])
@pytest.mark.parametrize("metric", ["cosine", "dot_product", "euclidean"])
def test_what_was_put_is_found_as_numpy_finds_it(client: LongbowClient, dataset: str, way: str, metric: Any) -> None:
    vectors = some_vectors(300)
    batch = vector_batch(np.arange(300) + 7, vectors, metric=metric)
    send = client.put if way == "put" else client.ingest
    assert send(dataset, slices(batch, 64)) == 300
    assert client.wait_ready(dataset, 300).indexed >= 300
    query = some_vectors(1, seed=5)[0]
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = {
        "cosine": 1 - unit @ (query / np.linalg.norm(query)),
        "dot_product": -(vectors @ query),
        "euclidean": np.linalg.norm(vectors - query, axis=1),
    }[metric]
    for hits in (client.search(dataset, query, 5), client.exchange(dataset, query, 5)):
        assert hits.ids.tolist() == (np.argsort(scores)[:5] + 7).tolist()
        assert (hits.ids.dtype, hits.scores.dtype) == (np.uint64, np.float32)
        if metric != "euclidean":
            assert np.allclose(hits.scores, np.sort(scores)[:5], atol=1e-4)


def test_acknowledgements_come_in_order_and_add_up(client: LongbowClient, dataset: str) -> None:
    acked: list[int] = []
    batch = vector_batch(range(100), some_vectors(100))
    assert client.ingest(dataset, slices(batch, 30), acked=acked.append) == 100
    assert acked == [30, 30, 30, 10]


def test_rows_come_back_as_they_were(client: LongbowClient, dataset: str) -> None:
    vectors = some_vectors(20)
    texts = [f"text {i} é" for i in range(20)]
    stamps = np.array(["2026-01-01T00:00:00"] * 20, "datetime64[ns]")
    batch = vector_batch(
        range(20), vectors, doc_ids=[f"doc-{i}" for i in range(20)], timestamps=stamps, columns={"text": texts}
    )
    client.ingest(dataset, batch)
    client.wait_ready(dataset, 20)
    table = pa.Table.from_batches(list(client.get(dataset))).sort_by("id")
    assert table["doc_id"].to_pylist() == [f"doc-{i}" for i in range(20)]
    assert table["text"].to_pylist() == texts
    assert np.array_equal(np.stack(table["vector"].to_numpy()), vectors)
    assert client.schema(dataset).field("vector").type == pa.list_(pa.float32(), 16)
    assert client.info(dataset).batches >= 1
    assert [d.name for d in client.list(dataset)] == [dataset]
    assert dataset in [d.name for d in client.list()]


def test_filters_are_numbers_or_texts_and_limit_is_kept_here(client: LongbowClient, dataset: str) -> None:
    batch = vector_batch(range(50), some_vectors(50), columns={"kind": ["a", "b"] * 25})
    client.ingest(dataset, batch)
    client.wait_ready(dataset, 50)
    assert client.ids(dataset, 10, 13) == {10, 11, 12}
    rows = [r for b in client.get(dataset, filters=[("kind", "=", "a"), ("id", "<", 10)]) for r in b["id"].to_pylist()]
    assert sorted(rows) == [0, 2, 4, 6, 8]
    assert sum(b.num_rows for b in client.get(dataset, limit=7)) == 7
    assert client.ids(a_name(), 0, 10) == set()


def test_deleting_a_row_and_a_dataset(client: LongbowClient, dataset: str) -> None:
    vectors = some_vectors(10)
    client.ingest(dataset, vector_batch(range(10), vectors))
    client.wait_ready(dataset, 10)
    assert client.search(dataset, vectors[3], 1).ids.tolist() == [3]
    client.delete(dataset, 3)
    assert 3 not in client.search(dataset, vectors[3], 1, fresh=True).ids
    client.delete(dataset)
    assert client.readiness(dataset).status == "NOT_FOUND"


def test_a_fresh_search_sees_what_a_kept_answer_does_not(client: LongbowClient, dataset: str) -> None:
    vectors = some_vectors(10)
    client.ingest(dataset, vector_batch(range(1, 10), vectors[1:]))
    client.wait_ready(dataset, 9)
    assert 0 not in client.search(dataset, vectors[0], 2).ids
    client.ingest(dataset, vector_batch([0], vectors[:1]))
    client.wait_ready(dataset, 10)
    assert client.search(dataset, vectors[0], 2, fresh=True).ids[0] == 0


def test_small_and_large_numbers_survive_the_ticket(client: LongbowClient, dataset: str) -> None:
    vectors = np.array([[1e-8, 3e-9, -1e-30], [-5e-9, 1e-7, 2e5], [0, 1, 0]], np.float32)
    client.ingest(dataset, vector_batch(range(3), vectors))
    client.wait_ready(dataset, 3)
    for i in range(3):
        assert client.search(dataset, vectors[i], 1).ids.tolist() == [i]


def test_another_dimension_or_type_is_refused_before_anything_is_sent(client: LongbowClient, dataset: str) -> None:
    client.ingest(dataset, vector_batch(range(5), some_vectors(5)))
    with pytest.raises(RequestError, match=rf"vectors are float\[8\] and {dataset} holds float\[16\]: use the model"):
        client.put(dataset, vector_batch([9], some_vectors(1, 8)))
    halves = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(16, np.float64)), 16)
    with pytest.raises(RequestError, match=r"vectors are double\[16\]"):
        client.ingest(dataset, pa.RecordBatch.from_arrays([pa.array([9]), halves], names=["id", "vector"]))
    client.wait_ready(dataset, 5)
    assert sum(b.num_rows for b in client.get(dataset)) == 5


def test_a_batch_with_other_columns_than_the_first_is_refused(client: LongbowClient, dataset: str) -> None:
    one, two = vector_batch([1], some_vectors(1)), vector_batch([2], some_vectors(1), columns={"x": ["y"]})
    with pytest.raises(RequestError, match="other columns than the first: x is string, wanted none"):
        client.ingest(dataset, [one, two])
    with pytest.raises(RequestError, match="a dict is to be sent, wanted record batches"):
        client.put(dataset, [{"id": 1}])
    assert client.put(dataset, []) == client.ingest(dataset, []) == 0


def test_a_missing_dataset_is_said_in_a_sentence(client: LongbowClient) -> None:
    name = a_name()
    for call in (lambda: client.info(name), lambda: list(client.get(name)), lambda: client.search(name, [1.0])):
        with pytest.raises(FlightError, match="refused"):
            call()
    with pytest.raises(FlightUnavailable, match=f"{name} is NOT_FOUND with 0 rows indexed after 0.1 s"):
        client.wait_ready(name, timeout=0.1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: c.search("d", [float("nan"), 1]), "not finite, so nothing is near"),
        (lambda c: c.search("d", [[1.0]]), r"float64 \[1, 1\], wanted numbers \[dim\]"),
        (lambda c: c.search("d", []), r"\[0\], wanted numbers"),
        (lambda c: c.search("d", ["a"]), "wanted numbers"),
        (lambda c: c.search("d", [1.0], 0), "k is 0, wanted a whole number from 1"),
        (lambda c: c.exchange("d", [1.0], True), "k is True"),
        (lambda c: c.search("", [1.0]), "the dataset is called ''"),
        (lambda c: c.info("{x"), "does not begin with a brace"),
        (lambda c: next(c.get("d", limit=0)), "limit is 0, wanted at least 1"),
        (lambda c: next(c.get("d", filters=[("a", "~", 1)])), "a filter is .*wanted .field, one of"),
        (lambda c: next(c.get("d", filters=[("a", "=", True)])), "a filter is"),
    ],
)
def test_arguments_that_can_never_work_are_refused_here(client: LongbowClient, call: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        call(client)


def test_caps_end_a_stream(client: LongbowClient, dataset: str) -> None:
    client.ingest(dataset, slices(vector_batch(range(100), some_vectors(100)), 10))
    with pytest.raises(FlightDataError, match="wanted at most 35"):
        list(client.get(dataset, caps=Caps(rows=35)))
    with pytest.raises(FlightDataError, match="raise the caps"):
        list(client.get(dataset, caps=Caps(nbytes=100)))


def test_a_left_stream_does_not_hold_up_the_next_call(client: LongbowClient, dataset: str) -> None:
    client.ingest(dataset, slices(vector_batch(range(100), some_vectors(100)), 10))
    for _ in client.get(dataset):
        break
    assert client.info(dataset).batches >= 1


def test_threads_share_a_client(client: LongbowClient, dataset: str) -> None:
    vectors = some_vectors(200)
    client.ingest(dataset, vector_batch(range(200), vectors))
    client.wait_ready(dataset, 200)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(int(client.search(dataset, vectors[i], 1).ids[0]) - i))
        for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0] * 16


@only_standin
def test_slow_down_signals_are_obeyed() -> None:
    with a_store(rate=500, queue=2) as client:
        batch = vector_batch(range(200), some_vectors(200))
        assert client.put("d", slices(batch, 10)) == 200
        assert client.slow_downs > 0
        assert client.readiness("d").status in ("BUSY", "READY")
        assert client.wait_ready("d", 200).indexed == 200


def test_a_server_that_is_not_there_is_said_after_the_retries() -> None:
    with LongbowClient("grpc://127.0.0.1:1", "grpc://127.0.0.1:1", retry=QUICK) as client:
        with pytest.raises(FlightUnavailable, match=r"127.0.0.1:1 cannot be reached for info .*is the server running\?"):
            client.info("d")
        with pytest.raises(FlightUnavailable):
            client.ingest("d", vector_batch([1], some_vectors(1)))


@pytest.mark.parametrize("bad", ["localhost:3000", "http://x:1", "", None, "grpc://"])
def test_addresses_that_are_none_are_refused(bad: Any) -> None:
    with pytest.raises((RequestError, FlightError)):
        LongbowClient(bad).list()
