"""What a client does with a store. The same tests run on a real Longbow: LONGBOW_ADDR=grpc://127.0.0.1:3000 pytest ..."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quarrel.errors import FlightDataError, FlightNotFound, FlightUnavailable, OptionWarning, RequestError
from quarrel.flight import LongbowClient, Readiness, vector_batch
from quarrel.flight.store import Store
from quarrel.flight.streams import Caps
from tests.flight.stores import QUICK, REAL, Swapped, a_name, a_store, some_vectors

V = some_vectors(1)[0]
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
    if client.exists(name):
        client.delete(name)


def slices(batch: pa.RecordBatch, size: int) -> list[pa.RecordBatch]:
    return [batch.slice(i, size) for i in range(0, batch.num_rows, size)]


def l2(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    return np.linalg.norm(vectors - query, axis=1)


@pytest.mark.parametrize("way", ["put", "ingest"])
@pytest.mark.parametrize("metric", ["cosine", "dot_product", "euclidean"])
def test_what_was_put_is_found_as_numpy_finds_it(client: LongbowClient, dataset: str, way: str, metric: Any) -> None:
    vectors, query = some_vectors(300), some_vectors(1, seed=5)[0]
    batch = vector_batch(np.arange(300) + 7, vectors, metric=metric)
    send = client.put if way == "put" else client.ingest
    assert send(dataset, slices(batch, 64)) == 300
    assert client.wait_ready(dataset, 300).indexed >= 300
    order = np.argsort(l2(vectors, query))
    warned = pytest.warns(OptionWarning, match=f"asks for {metric} and the store .* ranks by L2.*rerank='{metric}'")
    with nullcontext() if metric == "euclidean" else warned:
        found = [client.search(dataset, query, 5)]
    for hits in (*found, client.search(dataset, query, 5), client.exchange(dataset, query, 5)):
        assert hits.ids.tolist() == (order[:5] + 7).tolist()
        assert (hits.ids.dtype, hits.scores.dtype, hits.by) == (np.uint64, np.float32, "l2")
        assert np.allclose(hits.scores, 1 / (1 + l2(vectors, query)[order[:5]]), atol=2e-3)
        assert np.allclose(hits.distances, l2(vectors, query)[order[:5]], rtol=2e-2)


@pytest.mark.parametrize("measure", ["cosine", "dot_product"])
def test_another_measure_ranks_the_4_k_nearest_exactly(client: LongbowClient, dataset: str, measure: Any) -> None:
    vectors, query = some_vectors(200), some_vectors(1, seed=5)[0]
    client.ingest(dataset, vector_batch(range(200), vectors, metric=measure))
    client.wait_ready(dataset, 200)
    near = np.argsort(l2(vectors, query))[:20]
    products = vectors[near] @ query
    cosines = products / np.linalg.norm(vectors[near], axis=1) / np.linalg.norm(query)
    scores = cosines if measure == "cosine" else products
    best = np.argsort(-scores)[:5]
    assert near[best].tolist() != near[:5].tolist()
    hits = client.search(dataset, query, 5, rerank=measure)
    assert (hits.ids.tolist(), hits.by, len(hits)) == (near[best].tolist(), measure, 5)
    assert np.allclose(hits.scores, scores[best], rtol=1e-5)
    assert np.allclose(hits.cosines, cosines[best], rtol=1e-5)
    assert np.allclose(hits.distances, l2(vectors, query)[near[best]], rtol=1e-5)


def test_vectors_of_length_1_are_ranked_as_their_cosines(client: LongbowClient, dataset: str) -> None:
    vectors, query = some_vectors(100) * np.linspace(0.1, 9, 100, dtype=np.float32)[:, None], some_vectors(1, seed=5)[0]
    client.ingest(dataset, vector_batch(range(100), vectors, normalize=True))
    client.wait_ready(dataset, 100)
    cosines = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    hits = client.search(dataset, query, 100)
    assert hits.ids.tolist() == np.argsort(-cosines).tolist()
    assert np.allclose(hits.cosines, np.sort(cosines)[::-1], atol=5e-3)


def test_a_search_by_id_finds_the_row_and_what_is_near_it(client: LongbowClient, dataset: str) -> None:
    vectors = some_vectors(60)
    client.ingest(dataset, vector_batch(range(60), vectors, normalize=True))
    client.wait_ready(dataset, 60)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    hits = client.search_by_id(dataset, 7, 4)
    assert hits.ids.tolist() == np.argsort(l2(unit, unit[7]))[:4].tolist()
    assert np.allclose(hits.cosines, np.sort(unit @ unit[7])[::-1][:4], atol=5e-3)
    with pytest.raises(FlightNotFound, match=f"there is no such row in '{dataset}'.*999"):
        client.search_by_id(dataset, 999)


def test_a_whole_dataset_comes_after_a_part_of_it(client: LongbowClient, dataset: str) -> None:
    client.ingest(dataset, vector_batch(range(50), some_vectors(50)))
    for _ in range(5):
        assert client.ids(dataset, 10, 13) == {10, 11, 12}
        assert sum(b.num_rows for b in client.get(dataset)) == 50
        assert client.schema(dataset).names == ["id", "vector"]


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
    batch = vector_batch(range(50), some_vectors(50), columns={"kind": ["a", "b"] * 25}, metric="euclidean")
    client.ingest(dataset, batch)
    client.wait_ready(dataset, 50)
    assert client.ids(dataset, 10, 13) == {10, 11, 12}
    rows = [r for b in client.get(dataset, filters=[("kind", "=", "a"), ("id", "<", 10)]) for r in b["id"].to_pylist()]
    assert sorted(rows) == [0, 2, 4, 6, 8]
    assert client.search(dataset, some_vectors(50)[3], 3, filters=[("id", "=", 7.0)]).ids.tolist() == [7]
    assert [r for b in client.rows(dataset, [3, 99, 4]) for r in b["id"].to_pylist()] == [3, 4]
    assert sum(b.num_rows for b in client.get(dataset, limit=7)) == 7
    assert client.ids(a_name(), 0, 10) == set()


def test_deleting_a_row_and_a_dataset(client: LongbowClient, dataset: str) -> None:
    vectors = some_vectors(10)
    client.ingest(dataset, vector_batch(range(10), vectors, metric="euclidean"))
    client.wait_ready(dataset, 10)
    assert client.search(dataset, vectors[3], 1).ids.tolist() == [3]
    client.delete(dataset, 3)
    assert 3 not in client.search(dataset, vectors[3], 1, fresh=True).ids
    client.delete(dataset)
    assert not client.exists(dataset)


def test_a_fresh_search_sees_what_a_kept_answer_does_not(client: LongbowClient, dataset: str) -> None:
    vectors = some_vectors(10)
    client.ingest(dataset, vector_batch(range(1, 10), vectors[1:], metric="euclidean"))
    client.wait_ready(dataset, 9)
    assert 0 not in client.search(dataset, vectors[0], 2).ids
    client.ingest(dataset, vector_batch([0], vectors[:1]))
    client.wait_ready(dataset, 10)
    assert client.search(dataset, vectors[0], 2, fresh=True).ids[0] == 0


def test_small_and_large_numbers_survive_the_ticket(client: LongbowClient, dataset: str) -> None:
    vectors = np.array([[1e-8, 3e-9, -1e-30], [-5e-9, 1e-7, 2e5], [0, 1, 0]], np.float32)
    client.ingest(dataset, vector_batch(range(3), vectors, metric="euclidean"))
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


@pytest.mark.parametrize(
    "call",
    [
        lambda c, d: c.info(d),
        lambda c, d: c.schema(d),
        lambda c, d: list(c.get(d)),
        lambda c, d: list(c.get(d, filters=[("id", "=", 1)])),
        lambda c, d: list(c.rows(d, [1])),
        lambda c, d: c.search(d, [1.0]),
        lambda c, d: c.exchange(d, [1.0]),
        lambda c, d: c.search_by_id(d, 1),
        lambda c, d: c.delete(d),
        lambda c, d: c.delete(d, 1),
        lambda c, d: c.wait_ready(d, timeout=20),
    ],
)
def test_a_missing_dataset_is_said_in_one_sentence(client: LongbowClient, call: Any) -> None:
    name = a_name()
    with pytest.raises(FlightNotFound, match=f"^there is no dataset '{name}' in the store at grpc://.*: fill it first"):
        call(client, name)


@pytest.mark.parametrize(
    ("filter", "said"),
    [
        (("nobody", "=", 1), "there is no column 'nobody' to filter by; there are id, vector, kind, price"),
        (("id", "=", "x"), "id is compared with 'x', wanted a whole number that int64 holds"),
        (("id", "<", "1e3"), "id is compared with '1e3'"),
        (("id", "<", 1.5), "id is compared with 1.5"),
        (("id", "<", float("nan")), "id is compared with nan"),
        (("id", "<", 1 << 63), "wanted a whole number that int64 holds"),
        (("price", ">", "dear"), "price is compared with 'dear', wanted a number"),
        (("price", ">", "inf"), "wanted a number"),
        (("vector", "=", 1), "the column vector is fixed_size_list.*the store compares int64, float"),
        (("small", "<", 2), "the column small is int32, and the store compares int64"),
        (("id", "ne", 1), "a filter is .*wanted .field, one of"),
        (("id", "in", "1,2"), "a filter is"),
        (("kind", "=", "half a pair \ud800"), "is not Unicode"),
    ],
)
def test_a_filter_that_the_store_would_not_know_is_refused(client: LongbowClient, filter: Any, said: str) -> None:
    name = a_name()
    columns = {"kind": ["a", "😀"], "price": pa.array([1.5, 2.5], pa.float32())}
    columns["small"] = pa.array([1, 2], pa.int32())
    client.ingest(name, vector_batch([1, 2], some_vectors(2), columns=columns))
    try:
        for call in (lambda: list(client.get(name, filters=[filter])), lambda: client.search(name, V, filters=[filter])):
            with pytest.raises(RequestError, match=said):
                call()
        for good in (("price", ">", "2e0"), ("kind", "=", "😀"), ("id", "=", "+2")):
            assert [b["id"].to_pylist() for b in client.get(name, filters=[good]) if b.num_rows] == [[2]]
    finally:
        client.delete(name)


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
        (lambda c: c.info("\ud800"), "is not Unicode"),
        (lambda c: c.search("d", [1.0], rerank="l2"), "rerank is 'l2', wanted one of cosine, dot_product"),
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
    client.ingest(dataset, vector_batch(range(200), vectors, metric="euclidean"))
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
    with a_store(Store(rate=500, queue=2)) as client:
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


@pytest.mark.parametrize(
    "bad",
    [
        *(
            "localhost:3000",
            "http://x:1",
            "",
            None,
            "grpc://",
            "grpc+tls://",
            "grpc://:3000",
            "grpc://host",
            "grpc://host:0",
        ),
        *("grpc://host:x", "grpc://host:99999", "grpc+unix://", "grpc://[::1:3000"),
    ],
)
def test_addresses_that_are_none_are_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match="the address is .*, wanted one such as grpc://host:3000"):
        LongbowClient(bad)


@only_standin
def test_a_dataset_is_begun_while_another_is_indexed() -> None:
    store = Store()
    store.hold_index()
    with a_store(store) as client:
        for name in ("first", "second"):
            assert client.ingest(name, vector_batch(range(5), some_vectors(5))) == 5
            assert client.put(name, vector_batch([5], some_vectors(1))) == 1
        assert client.readiness("none").status == "BUSY"
        assert not client.exists("none")
        assert client.ids("none", 0, 9) == set()
        assert client.ids("second", 3, 9) == {3, 4, 5}
        seen: list[Readiness] = []
        with pytest.raises(
            FlightUnavailable, match="second is BUSY with 0 rows indexed after 0.1 s, wanted READY: wait longer"
        ):
            client.wait_ready("second", timeout=0.1, progress=seen.append)
        assert {s.status for s in seen} == {"BUSY"}
        store.let_index()
        assert client.wait_ready("second", 6).indexed == 6


@only_standin
def test_ready_with_too_few_rows_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarrel.flight.waiting.SHORT", 0.1)
    with a_store() as client:
        client.ingest("d", vector_batch(range(5), some_vectors(5)))
        with pytest.raises(FlightUnavailable, match="d is READY with 5 rows indexed after .* wanted READY with 6"):
            client.wait_ready("d", 6, timeout=float("inf"))


@only_standin
def test_a_store_that_compares_wrongly_is_not_believed() -> None:
    store, vectors = Swapped(), some_vectors(300)
    with a_store(store) as client:
        client.ingest("d", vector_batch(range(300), vectors, columns={"kind": ["a", "b"] * 150}, normalize=True))
        assert store.table("d", [{"field": "id", "operator": "<", "value": "10"}]).num_rows == 285  # as a Longbow did
        assert client.ids("d", 10, 13) == {10, 11, 12}
        assert [b["id"].to_pylist() for b in client.rows("d", [7])] == [[7]]
        for filters, wanted in (
            ([("id", ">=", 8), ("id", "<", 11)], [[8, 9, 10]]),
            ([("id", "<=", 3), ("kind", "=", "b")], [[1, 3]]),
            ([("id", ">", 298)], [[299]]),
        ):
            assert [b["id"].to_pylist() for b in client.get("d", filters=filters)] == wanted
        client.wait_ready("d", 300)
        assert 3 not in client.search("d", vectors[3], 2, filters=[("kind", "=", "b"), ("id", "!=", 3)]).ids
        with pytest.raises(FlightDataError, match="let row .* of d through a filter that it does not pass"):
            client.search("d", vectors[3], 2, filters=[("id", "<", 10)])


@only_standin
def test_results_of_texts_as_ids_are_not_taken_for_other_rows() -> None:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.eye(3, dtype=np.float32).ravel()), 3)
    with a_store() as client:
        client.put("d", pa.record_batch([pa.array(["b", "0", "1"]), lists], ["id", "vector"]))
        client.wait_ready("d", 3)
        assert client.search("d", [1.0, 0.0, 0.0], 1).ids.tolist() == [0]  # the row, whose id is b
        for found in (lambda: list(client.rows("d", [0])), lambda: client.search("d", [1.0, 0, 0], 1, rerank="cosine")):
            with pytest.raises(FlightDataError, match="column id of d is string, wanted whole numbers"):
                found()


@only_standin
def test_a_kind_store_is_served_too() -> None:
    vectors = some_vectors(40)
    with a_store(Store(kind=True)) as client:
        client.ingest("d", vector_batch(range(40), vectors))
        client.wait_ready("d", 40)
        cosines = vectors @ vectors[3] / np.linalg.norm(vectors, axis=1) / np.linalg.norm(vectors[3])
        assert client.search("d", vectors[3], 5).ids.tolist() == np.argsort(-cosines)[:5].tolist()
        assert np.isnan(client.search("d", vectors[3], 5).distances).all()  # its scores are 1 - cosine
        hits = client.search("d", vectors[3], 5, rerank="cosine")
        assert np.allclose(hits.cosines, np.sort(cosines)[::-1][:5])
        client.delete("d", 3)
        assert 3 not in client.search("d", vectors[3], 5, fresh=True).ids
        client.delete("d")
        assert client.list() == []
