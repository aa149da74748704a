"""Servers that break off, stall, lie or send bytes that would crash whoever trusts them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from quarrel.errors import FlightDataError, FlightError, FlightUnavailable, QuarrelError
from quarrel.flight import Access, LongbowClient, vector_batch
from tests.flight.stores import QUICK, some_vectors

READY = {"status": "NOT_FOUND", "index_len": 0}


class Hostile(flight.FlightServerBase):  # type: ignore[misc]
    """Answers each kind of call by a function given to it."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._answers = answers

    def do_get(self, context: Any, ticket: Any) -> Any:
        return self._answers["get"]()

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self._answers["put"](reader, writer)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self._answers["exchange"](reader, writer)

    def do_action(self, context: Any, action: Any) -> Any:
        return iter([self._answers.get("action", lambda: json.dumps(READY).encode())()])

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        raise pa.ArrowKeyError("dataset not found")


@contextmanager
def facing(timeout: float = 5.0, **answers: Callable[..., Any]) -> Iterator[LongbowClient]:
    with Hostile(**answers) as server:
        address = f"grpc://127.0.0.1:{server.port}"
        with LongbowClient(address, address, access=Access(timeout=timeout), retry=QUICK) as client:
            yield client


def answer(ids: Any = (1, 2), scores: Any = (0.5, 0.6), id_type: Any = None, score_type: Any = None) -> pa.Table:
    return pa.table({"id": pa.array(ids, id_type or pa.uint64()), "score": pa.array(scores, score_type or pa.float32())})


def bent_strings() -> pa.RecordBatch:
    """A utf8 column whose first text ends far behind its bytes: reading it without a check ends the process."""
    offsets = pa.py_buffer(np.array([0, 2**30, 6], np.int32))
    column = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"abcdef")])
    return pa.RecordBatch.from_arrays([column], names=["text"])


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (answer(id_type=pa.int64()), "column id is int64, wanted uint64"),
        (answer(score_type=pa.float64()), "column score is double, wanted float"),
        (pa.table({"id": pa.array([1], pa.uint64())}), "column score is missing"),
        (answer(ids=(None, 1)), "column id holds 1 nulls"),
        (answer(ids=range(50), scores=[0.1] * 50), "wanted at most 3"),
        (pa.table({}), "column id is missing|wanted uint64"),
    ],
)
def test_answers_of_a_wrong_shape_are_refused(table: pa.Table, said: str) -> None:
    def get() -> Any:
        return flight.RecordBatchStream(table if table.num_columns else pa.table({"x": [1]}))

    with facing(get=get) as client, pytest.raises(FlightDataError, match=said):
        client.search("d", [1.0, 2.0], 3)


def test_offsets_outside_their_buffer_are_found_before_anybody_reads_them() -> None:
    bent = bent_strings()
    with facing(get=lambda: flight.GeneratorStream(bent.schema, iter([bent]))) as client:
        with pytest.raises(FlightDataError, match="sent a batch that is not sound"):
            next(client.get("d"))


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_a_stream_that_breaks_off_is_an_error_behind_its_batches(batches: int) -> None:
    table = answer()

    def broken() -> Iterator[pa.RecordBatch]:
        yield from table.to_batches() * batches
        raise flight.FlightInternalError("disk on fire")

    got: list[pa.RecordBatch] = []
    with facing(get=lambda: flight.GeneratorStream(table.schema, broken())) as client:
        with pytest.raises(FlightError, match="disk on fire"):
            got.extend(client.get("d"))
    assert sum(batch.num_rows for batch in got) == 2 * batches


@pytest.mark.parametrize("call", ["search", "get", "ingest", "put", "exchange"])
def test_a_stalled_server_is_left_at_the_deadline(call: str) -> None:
    over = threading.Event()

    def stall(*_: Any) -> Any:
        over.wait(20)
        raise flight.FlightCancelledError("late")

    with facing(timeout=0.3, get=stall, exchange=stall, put=stall) as client:
        batch = vector_batch([1], some_vectors(1))
        calls = {
            "search": lambda: client.search("d", [1.0]),
            "exchange": lambda: client.exchange("d", [1.0]),
            "get": lambda: list(client.get("d")),
            "ingest": lambda: client.ingest("d", batch),
            "put": lambda: client.put("d", batch),
        }
        began = time.perf_counter()
        try:
            with pytest.raises(FlightUnavailable, match=r"did not finish .* within 0.3 s"):
                calls[call]()
            assert time.perf_counter() - began < 60
        finally:
            over.set()


def acks(*said: dict[str, Any] | bytes) -> Callable[..., None]:
    def exchange(reader: Any, writer: Any) -> None:
        for one in said:
            writer.write_metadata(one if isinstance(one, bytes) else json.dumps(one).encode())
        for _ in reader:
            pass

    return exchange


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        (acks(), "ended with 1 batches, 1 rows, not acknowledged"),
        (acks(b"yes"), "answer to exchange is b'yes', wanted a JSON object"),
        (acks(b"[]"), "wanted a JSON object"),
        (acks({"status": "rejected", "reason": "disk full"}), "did not take a batch: disk full"),
    ],
)
def test_acknowledgements_that_are_none(exchange: Callable[..., None], said: str) -> None:
    with facing(exchange=exchange) as client, pytest.raises(FlightError, match=said):
        client.ingest("d", vector_batch([1], some_vectors(1)))


def test_more_acknowledgements_than_batches_are_refused() -> None:
    ack = {"status": "acked", "batch_id": 0, "rows": 1}
    with facing(exchange=acks(ack, ack, ack)) as client, pytest.raises(FlightDataError, match="never sent"):
        client.ingest("d", vector_batch([1], some_vectors(1)))


def test_a_put_that_the_server_refuses_says_why() -> None:
    def refuse(reader: Any, writer: Any) -> None:
        raise pa.ArrowInvalid("vector column is not FixedSizeList")

    with facing(put=refuse) as client, pytest.raises(FlightError, match="refused the put .*not FixedSizeList$"):
        client.put("d", vector_batch([1], some_vectors(1)))


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"[" * 200_000, b"nonsense", b'{"status": "FINE"}', b'{"status": "READY", "index_len": "many"}'],
)
def test_a_readiness_that_is_none_is_refused(body: bytes) -> None:
    with facing(action=lambda: body) as client, pytest.raises(FlightDataError):
        client.readiness("d")


@pytest.mark.parametrize("body", [b"deleted", b'{"status": "ok"}', b'{"status": "deleted"}', b"{}", b""])
def test_a_deletion_is_told_in_text_or_json(body: bytes) -> None:
    with facing(action=lambda: body) as client:
        client.delete("d")
        client.delete("d", 3)


@pytest.mark.parametrize("body", [b"no", b'{"error": "the disk is full"}', b'{"status": "busy"}', b"\xff", b"{"])
def test_a_deletion_that_is_not_told_is_an_error(body: bytes) -> None:
    with facing(action=lambda: body) as client, pytest.raises(FlightDataError, match="the server's answer to delete"):
        client.delete("d", 3)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"ids": [1]}', b'{"ids": [-1], "scores": [1]}', b'{"ids": ["a"], "scores": [1]}', b'{"ids": 3}']
)
def test_an_answer_by_id_that_is_none_is_refused(body: bytes) -> None:
    with facing(action=lambda: body) as client, pytest.raises(FlightDataError, match="answer to VectorSearchByID"):
        client.search_by_id("d", 3)


@pytest.mark.parametrize("scores", [(0.9, 0.0), (0.9, -1.0), (0.9, 7.0), (0.9, float("nan")), (0.9, float("inf"))])
def test_a_score_that_is_no_distance_is_told_as_none(scores: tuple[float, float]) -> None:
    with facing(get=lambda: flight.RecordBatchStream(answer(scores=scores))) as client:
        hits = client.search("d", [1.0], 2)
    assert np.isnan(hits.distances).tolist() == np.isnan(hits.cosines).tolist() == [False, True]
    assert np.array_equal(hits.scores, np.array(scores, np.float32), equal_nan=True)


def test_calls_that_change_nothing_are_made_again() -> None:
    tries: list[int] = []

    def get() -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise flight.FlightUnavailableError("warming up")
        return flight.RecordBatchStream(answer())

    with facing(get=get) as client:
        assert client.search("d", [1.0], 2).ids.tolist() == [1, 2]
    assert len(tries) == 3


def test_calls_that_change_something_are_not() -> None:
    tries: list[int] = []

    def exchange(reader: Any, writer: Any) -> None:
        tries.append(1)
        raise flight.FlightUnavailableError("gone")

    with facing(exchange=exchange) as client, pytest.raises(FlightUnavailable):
        client.ingest("d", vector_batch([1], some_vectors(1)))
    assert len(tries) == 1


@pytest.mark.parametrize("call", ["put", "ingest"])
def test_one_thread_writes_and_reads_a_stream(call: str) -> None:
    """gRPC ends the process where a refused stream is closed on one thread while another writes to it: seldom, so what is
    held here is that there is no other."""

    def refuse(reader: Any, writer: Any) -> None:
        next(reader)
        raise pa.ArrowInvalid("the disk is full")

    def batches() -> Iterator[pa.RecordBatch]:
        for i in range(20):
            others.extend(t.name for t in threading.enumerate() if t not in before and t.name.startswith("quarrel"))
            yield vector_batch([i], some_vectors(1))

    before, others = threading.enumerate(), list[str]()
    with facing(put=refuse, exchange=refuse) as client, pytest.raises(FlightError, match="the disk is full"):
        getattr(client, call)("d", batches())
    assert not others


def test_headers_reach_the_server() -> None:
    seen: list[str] = []

    class Factory(flight.ServerMiddlewareFactory):  # type: ignore[misc]
        def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
            seen.extend(headers.get("x-longbow-key", []))

    class Server(flight.FlightServerBase):  # type: ignore[misc]
        def do_action(self, context: Any, action: Any) -> Any:
            return iter([json.dumps(READY).encode()])

    with Server("grpc://127.0.0.1:0", middleware={"seen": Factory()}) as server:
        address = f"grpc://127.0.0.1:{server.port}"
        with LongbowClient(address, address, access=Access(headers={"X-Longbow-Key": "shard-7"})) as client:
            client.readiness("d")
    assert seen == ["shard-7"]


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_deadline_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(QuarrelError, match="the timeout is"):
        LongbowClient(access=Access(timeout=timeout))
