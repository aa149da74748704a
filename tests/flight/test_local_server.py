"""The stand-in answers as a real Longbow was seen to answer, its faults included. Spoken to by pyarrow alone.

LONGBOW_ADDR=grpc://127.0.0.1:3000 pytest ... runs what is not about the stand-in's own parts on a real store.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from quarrel.errors import QuarrelError
from quarrel.flight.local_server import LocalServer
from quarrel.flight.store import Store
from tests.flight.stores import REAL, a_name, real_meta, some_vectors

only_standin = pytest.mark.skipif(bool(REAL), reason="about the stand-in, and LONGBOW_ADDR names a real store")

VECTORS = some_vectors(60) * np.linspace(0.2, 4, 60, dtype=np.float32)[:, None]


class Wire:
    """Calls of the protocol, with nothing between the test and the bytes."""

    def __init__(self, data: str, meta: str) -> None:
        self.data, self.meta = flight.FlightClient(data), flight.FlightClient(meta)

    def put(self, name: str, batch: pa.RecordBatch, timeout: float = 60) -> None:
        options = flight.FlightCallOptions(timeout=timeout)
        writer, _ = self.data.do_put(flight.FlightDescriptor.for_path(name), batch.schema, options)
        with writer:
            writer.write_batch(batch)

    def ingest(
        self, name: str, batches: list[pa.RecordBatch], timeout: float = 60, heard: list[Any] | None = None
    ) -> list[Any]:
        """The acknowledgements; `heard` has those before a fault, too."""
        heard = [] if heard is None else heard
        options = flight.FlightCallOptions(timeout=timeout)
        writer, reader = self.data.do_exchange(flight.FlightDescriptor.for_path("ingest", name), options)
        with writer:
            writer.begin(batches[0].schema)
            for batch in batches:
                writer.write_batch(batch)
            writer.done_writing()
            return [json.loads(reader.read_chunk().app_metadata.to_pybytes()) for _ in batches]

    def filled(self, count: int = 50, **more: Any) -> str:
        """A new dataset of so many rows, indexed."""
        name = a_name()
        self.put(name, batch_of(0, count, **more))
        self.ready(name, count)
        return name

    def get(self, ticket: bytes | dict[str, Any]) -> pa.Table:
        raw = ticket if isinstance(ticket, bytes) else json.dumps(ticket).encode()
        return self.data.do_get(flight.Ticket(raw)).read_all()

    def ids(self, name: str, *filters: tuple[str, str, Any]) -> list[int]:
        made = [{"field": f, "operator": o, "value": v} for f, o, v in filters]
        return sorted(self.get({"name": name, "filters": made})["id"].to_pylist())

    def search(self, name: str, query: np.ndarray, k: int, **more: Any) -> tuple[list[int], list[float]]:
        found = self.get({"search": {"dataset": name, "k": k, "vector": query.astype(float).tolist(), **more}})
        return found["id"].to_pylist(), found["score"].to_pylist()

    def act(self, action: str, body: bytes | dict[str, Any], port: str = "meta") -> bytes:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        (said,) = getattr(self, port).do_action(flight.Action(action, raw))
        return bytes(said.body.to_pybytes())

    def readiness(self, name: str) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.act("check_readiness", {"dataset": name}))
        return said

    def ready(self, name: str, rows: int) -> None:
        end = time.monotonic() + 60
        while (said := self.readiness(name))["status"] != "READY" or said["index_len"] < rows:
            assert time.monotonic() < end, said
            time.sleep(0.005)

    def info(self, name: str) -> flight.FlightInfo:
        return self.meta.get_flight_info(flight.FlightDescriptor.for_path(name))


def batch_of(low: int, high: int, metric: str | None = None, **columns: Any) -> pa.RecordBatch:
    """The rows low to high of VECTORS, with their numbers as ids."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(VECTORS[low:high].ravel()), 16)
    arrays = {"id": pa.array(range(low, high)), "vector": vectors} | {n: pa.array(c) for n, c in columns.items()}
    metadata = {"longbow.metric": metric} if metric else None
    schema = pa.schema([(n, a.type) for n, a in arrays.items()], metadata)
    return pa.record_batch(list(arrays.values()), schema)


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    if REAL:
        yield Wire(REAL, real_meta())
        return
    with LocalServer() as server:
        yield Wire(server.data, server.meta)


@pytest.fixture
def store() -> Iterator[tuple[Store, Wire]]:
    """A stand-in of the test's own."""
    with LocalServer() as server:
        yield server.store, Wire(server.data, server.meta)


def near(row: int, of: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Rows by their L2 distance from one of them, and those distances."""
    distances = np.linalg.norm(of - VECTORS[row], axis=1)
    order = np.argsort(distances)
    return order.tolist(), distances[order]


@pytest.mark.parametrize("metric", [None, "cosine", "dot_product", "euclidean"])
def test_whatever_the_metric_the_order_is_by_l2_and_the_score_one_over_one_plus_it(wire: Wire, metric: str | None) -> None:
    ids, scores = wire.search(wire.filled(60, metric=metric), VECTORS[7], 5)
    order, distances = near(7, VECTORS)
    assert ids == order[:5]
    assert np.allclose(scores, 1 / (1 + distances[:5]), atol=2e-3)
    assert scores[0] == 1.0


def test_what_is_deleted_is_said_in_bare_text(wire: Wire) -> None:
    name = wire.filled()
    assert wire.act("delete", {"dataset": name, "id": "3"}) == b"deleted"
    assert wire.ids(name, ("id", "<", "5")) == [0, 1, 2, 4]
    assert 3 not in wire.search(name, VECTORS[3], 5)[0]
    assert wire.act("delete-dataset", {"dataset": name}) == b"deleted"
    assert wire.readiness(name)["status"] == "NOT_FOUND"


def test_a_deleted_row_that_is_put_again_is_there_again(wire: Wire) -> None:
    name = wire.filled(5)
    wire.act("delete", {"dataset": name, "id": "3"})
    wire.put(name, batch_of(3, 4))
    assert wire.ids(name) == [0, 1, 2, 3, 4]


def test_a_ticket_that_is_a_bare_name_keeps_the_filters_of_the_one_before_it(wire: Wire) -> None:
    name = wire.filled()
    for _ in range(3):
        assert wire.ids(name, ("id", ">=", "10"), ("id", "<", "13")) == [10, 11, 12]
        assert wire.get(name.encode())["id"].to_pylist() == [10, 11, 12]
        assert wire.get({"name": name}).num_rows == 50


def test_filters_are_joined_by_and_and_come_before_a_search(wire: Wire) -> None:
    name = wire.filled(kind=["a", "b"] * 25)
    assert wire.ids(name, ("kind", "=", "a"), ("id", "<", "10")) == [0, 2, 4, 6, 8]
    even = [i for i in near(3, VECTORS[:50])[0] if i % 2 == 0]
    filters = [{"field": "kind", "operator": "=", "value": "a"}]
    assert wire.search(name, VECTORS[3], 5, filters=filters)[0] == even[:5]


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("= == eq", 1),
        ("!= neq", 49),
        ("< lt", 10),
        ("> gt", 39),
        ("<= le", 11),
        (">= ge", 40),
        ("ne <> lte gte in like contains ~", 0),
    ],
)
def test_operators_that_are_known_and_strange_ones_that_match_nothing(wire: Wire, words: str, rows: int) -> None:
    name = wire.filled()
    for word in words.split():
        assert len(wire.ids(name, ("id", word, "10"))) == rows, word


def test_a_filter_that_makes_no_sense_is_silent_in_a_get_and_refused_in_a_search(wire: Wire) -> None:
    name = wire.filled()
    assert wire.ids(name, ("nobody", "=", "1")) == []
    assert wire.ids(name, ("id", "=", "x")) == []
    assert wire.ids(name, ("id", "=", 10)) == [10]
    with pytest.raises(pa.ArrowInvalid, match="filter"):
        wire.search(name, VECTORS[0], 5, filters=[{"field": "id", "operator": "like", "value": "1"}])


def test_a_limit_does_nothing_and_a_result_is_cut_by_k(wire: Wire) -> None:
    name = wire.filled()
    assert wire.get({"name": name, "limit": 7}).num_rows == 50
    assert len(wire.search(name, VECTORS[0], 7)[0]) == 7
    assert len(wire.search(name, VECTORS[0], 1000)[0]) == 50


MISSING: dict[str, Callable[[Wire, str], Any]] = {
    "get": lambda wire, name: wire.get({"name": name}),
    "get by bare name": lambda wire, name: wire.get(name.encode()),
    "search": lambda wire, name: wire.search(name, VECTORS[0], 1),
    "info": lambda wire, name: wire.info(name),
    "delete": lambda wire, name: wire.act("delete", {"dataset": name, "id": "1"}),
    "delete-dataset": lambda wire, name: wire.act("delete-dataset", {"dataset": name}),
    "by id": lambda wire, name: wire.act("VectorSearchByID", {"dataset": name, "id": "1", "k": 1}),
    "namespace": lambda wire, name: wire.act("DeleteNamespace", {"name": name}),
    "no namespace": lambda wire, name: wire.act("DeleteNamespace", {"name": ""}),
}


@pytest.mark.parametrize("call", MISSING)
def test_what_is_missing_is_not_found(wire: Wire, call: str) -> None:
    with pytest.raises(KeyError, match="not found"):
        MISSING[call](wire, a_name())


NULLS = pa.record_batch([pa.array([1]), pa.array([None], pa.list_(pa.float32(), 16))], ["id", "vector"])
TEXTS = pa.record_batch([pa.array([1]), pa.array([["x"]], pa.list_(pa.string(), 1))], ["id", "vector"])
REFUSED: dict[str, tuple[Callable[[Wire, str], Any], str]] = {
    "id of another type": (lambda w, n: w.act("delete", {"dataset": n, "id": 3}), "cannot unmarshal number"),
    "by id of another type": (
        lambda w, n: w.act("VectorSearchByID", {"dataset": n, "id": 3, "k": 2}),
        "cannot unmarshal number",
    ),
    "another key": (lambda w, n: w.act("delete-dataset", {"name": n}), "missing dataset name"),
    "no JSON": (lambda w, n: w.act("check_readiness", b"{not json"), "invalid json body"),
    "another query": (lambda w, n: w.search(n, VECTORS[0][:15], 3), "expected 16, got 15"),
    "k 0": (lambda w, n: w.search(n, VECTORS[0], 0), "k must be at least 1"),
    "a query of texts": (
        lambda w, n: w.get({"search": {"dataset": n, "k": 1, "vector": ["x"]}}),
        "no list of finite numbers",
    ),
    "a query of lists": (
        lambda w, n: w.get({"search": {"dataset": n, "k": 1, "vector": [[1]]}}),
        "no list of finite numbers",
    ),
    "a huge query": (lambda w, n: w.search(n, np.full(16, 1e300), 3), "no list of finite numbers"),
    "filters that are none": (lambda w, n: w.get({"name": n, "filters": [3]}), "wanted a list of objects"),
    "a vector that is null": (lambda w, n: w.put(n, NULLS), "holds nulls"),
    "vectors of texts": (lambda w, n: w.put(a_name(), TEXTS), "vectors are of string, wanted numbers"),
    "k -1": (lambda w, n: w.search(n, VECTORS[0], -1), "k must be at least 1"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_is_refused_as_an_invalid_argument(wire: Wire, call: str) -> None:
    make, said = REFUSED[call]
    name = wire.filled(5)
    with pytest.raises(pa.ArrowInvalid, match=said):
        make(wire, name)


UNIMPLEMENTED: dict[str, tuple[Callable[[Wire], Any], str]] = {
    "actions of data": (lambda w: list(w.data.list_actions()), "(?i)unimplemented"),
    "actions of meta": (lambda w: list(w.meta.list_actions()), "(?i)unimplemented"),
    "list": (lambda w: list(w.data.list_flights()), "not implemented on DataServer"),
    "info": (lambda w: w.data.get_flight_info(flight.FlightDescriptor.for_path("x")), "not implemented on DataServer"),
    "action": (lambda w: w.act("no-such-action", {}), "unknown action type no-such-action"),
}


@pytest.mark.parametrize("call", UNIMPLEMENTED)
def test_what_a_port_does_not_have(wire: Wire, call: str) -> None:
    make, said = UNIMPLEMENTED[call]
    with pytest.raises(NotImplementedError, match=said):
        make(wire)


def test_info_counts_batches_and_has_no_columns(wire: Wire) -> None:
    name = wire.filled(20)
    wire.put(name, batch_of(20, 40))
    wire.ready(name, 40)
    info = wire.info(name)
    assert (info.total_records, info.endpoints) == (2, [])
    assert name in [f.descriptor.path[0].decode() for f in wire.meta.list_flights()]


def test_an_exchange_acknowledges_every_batch(wire: Wire) -> None:
    name, batches = a_name(), [batch_of(0, 30), batch_of(30, 50), batch_of(50, 55)]
    said = wire.ingest(name, batches)
    assert said == [{"status": "acked", "batch_id": i, "rows": b.num_rows} for i, b in enumerate(batches)]
    assert wire.ids(name) == list(range(55))


def test_a_search_by_the_id_of_a_row(wire: Wire) -> None:
    name = wire.filled()
    said = json.loads(wire.act("VectorSearchByID", {"dataset": name, "id": "3", "k": 4}))
    order, distances = near(3, VECTORS[:50])
    assert said["ids"] == order[:4]
    assert np.allclose(said["scores"], 1 / (1 + distances[:4]), atol=2e-3)


def test_ids_are_no_key_columns_may_be_added_and_no_vector_of_another_length(wire: Wire) -> None:
    name = wire.filled()
    wire.put(name, batch_of(0, 50))
    wire.put(name, batch_of(58, 60, year=[1, 2]))
    assert wire.ids(name) == sorted([*range(50), *range(50), 58, 59])
    assert wire.get({"name": name})["year"].null_count == 100
    short = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(8, np.float32)), 8)
    with pytest.raises(pa.ArrowInvalid, match="schema mismatch"):
        wire.put(name, pa.record_batch([pa.array([1]), short], ["id", "vector"]))


@only_standin
def test_any_name_is_busy_while_another_dataset_waits_to_be_indexed(store: tuple[Store, Wire]) -> None:
    held, wire = store
    held.hold_index()
    wire.put("big", batch_of(0, 50))
    assert wire.readiness("big") == {"status": "BUSY", "reason": "dataset has 1 pending index jobs", "index_len": 0}
    wire.put("small", batch_of(0, 10))
    for name in ("small", "nobody"):
        said = wire.readiness(name)
        assert (said["status"], "global index queue" in said["reason"], "index_len" in said) == ("BUSY", True, False)
    with pytest.raises(KeyError, match="not found"):
        wire.info("nobody")
    assert wire.ids("small") == list(range(10))
    assert wire.search("small", VECTORS[0], 5)[0] == []
    wire.act("delete-dataset", {"dataset": "big"})
    assert wire.readiness("nobody")["status"] == "BUSY"
    held.let_index()
    wire.ready("small", 10)
    assert wire.readiness("nobody")["status"] == "NOT_FOUND"


@only_standin
@pytest.mark.parametrize("way", ["close", "kill"])
def test_after_a_restart_the_rows_are_there_and_indexed_again(way: str) -> None:
    with LocalServer() as server:
        wire = Wire(server.data, server.meta)
        name = wire.filled()
        wire.act("delete", {"dataset": name, "id": "3"})
        getattr(server, way)()
        with pytest.raises(flight.FlightUnavailableError):
            wire.info(name)
        server.store.hold_index()
        server.restart()
        wire = Wire(server.data, server.meta)
        assert len(wire.ids(name)) == 49
        assert wire.readiness(name)["index_len"] == 0
        assert wire.readiness("nobody")["status"] == "BUSY"
        server.store.let_index()
        wire.ready(name, 50)
        assert wire.search(name, VECTORS[7], 1)[0] == [7]


def hold_open(wire: Wire) -> Any:
    """An exchange whose caller neither sends nor leaves."""
    writer, reader = wire.data.do_exchange(flight.FlightDescriptor.for_path("ingest", "d"))
    writer.begin(batch_of(0, 1).schema)
    writer.write_batch(batch_of(0, 1))
    reader.read_chunk()
    return writer, reader


@only_standin
@pytest.mark.parametrize("way", ["close", "kill", "cut"])
def test_a_caller_who_stays_is_cut_off(way: str) -> None:
    with LocalServer() as server:
        writer, reader = hold_open(Wire(server.data, server.meta))
        getattr(server, way)()
        with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
            reader.read_chunk()
        with pytest.raises((flight.FlightError, pa.ArrowException, OSError)):
            writer.close()


@only_standin
def test_an_interrupt_that_another_thread_was_given_ends_the_wait() -> None:
    """So does the kernel now and then, or it comes between Python's look for one and the wait: nothing then wakes that."""
    with LocalServer() as server:
        threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)).start()
        end = threading.Timer(30, server.close)
        end.start()
        with pytest.raises(KeyboardInterrupt):
            server.wait()
        end.cancel()
        assert not server._closed.is_set()


@only_standin
def test_a_port_that_is_taken_leaves_the_other_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        first = free.getsockname()[1]
        free.close()
        with pytest.raises(QuarrelError, match="cannot be opened"):
            LocalServer("127.0.0.1", first, taken.getsockname()[1])
        socket.create_server(("127.0.0.1", first)).close()


@only_standin
@pytest.mark.parametrize("way", ["put", "ingest"])
def test_a_full_store_is_silent_until_the_caller_gives_up_and_deleting_makes_no_room(way: str) -> None:
    batch = batch_of(0, 10)
    with LocalServer(store=Store(memory=2 * batch.nbytes)) as server:
        wire = Wire(server.data, server.meta)
        wire.put("d", batch)
        wire.put("d", batch)
        wire.act("delete-dataset", {"dataset": "d"})
        call = partial(wire.put, "d", batch) if way == "put" else partial(wire.ingest, "d", [batch])
        with pytest.raises(flight.FlightTimedOutError):
            call(timeout=1.0)  # the store has heard of it by then
        assert wire.ids("d") == []


@only_standin
def test_a_kind_store_has_none_of_the_faults() -> None:
    batch = batch_of(0, 10, metric="dot_product")
    with LocalServer(store=Store(kind=True, memory=batch.nbytes)) as server:
        wire = Wire(server.data, server.meta)
        wire.put("d", batch)
        wire.ready("d", 10)
        with pytest.raises(pa.ArrowInvalid, match="the store is full"):
            wire.put("d", batch)
        assert wire.ids("d", ("id", "<", "3")) == [0, 1, 2]
        assert wire.get(b"d").num_rows == 10
        with pytest.raises(pa.ArrowInvalid, match="bad filter"):
            wire.ids("d", ("id", "like", "3"))
        products = VECTORS[:10] @ VECTORS[7]
        ids, scores = wire.search("d", VECTORS[7], 3)
        assert ids == np.argsort(-products)[:3].tolist()
        assert np.allclose(scores, np.sort(-products)[:3], atol=1e-4)
        assert json.loads(wire.act("delete-dataset", {"dataset": "d"})) == {"status": "ok"}
        server.store.hold_index()
        wire.put("d", batch)
        assert wire.readiness("d")["status"] == "BUSY"
        assert wire.readiness("nobody")["status"] == "NOT_FOUND"
