"""A store that is killed, hangs, drips, is full, forgets, compares wrongly: each vector arrives once, or it is said."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quarrel.embed import sinks
from quarrel.embed.pipeline import Pipeline, Summary
from quarrel.embed.sinks import FileSink
from quarrel.errors import FlightDataError, FlightUnavailable, RequestError
from quarrel.flight import Access, LongbowClient
from quarrel.flight.local_server import LocalServer
from quarrel.flight.store import Kept, Store
from quarrel.llm import Embeddings
from tests.embed.support import QUICK, pipeline
from tests.embed.wire import Wire
from tests.flight.stores import Swapped

TEXTS = [f"text {i}" for i in range(160)]
"""Ten blocks of 16."""


class Encoder:
    """A vector of length 1 for each text, from its letters alone."""

    n_ctx = 512

    def embedding_prefix(self, prefix: str | None) -> str:
        return prefix or ""

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def embed(self, texts: list[list[int]], **_: object) -> Embeddings:
        rows = [np.random.default_rng(ids).standard_normal(8) for ids in texts]
        vectors = np.array([row / np.linalg.norm(row) for row in rows], np.float32).reshape(len(texts), 8)
        counts = np.array([len(ids) for ids in texts], np.int32)
        return Embeddings(vectors, np.arange(len(texts), dtype=np.int32), counts, "mean", True, 8)


class Mortal(Store):
    """A store that dies, with all its connections, at the n-th time of an event: `find` (is there such a dataset), `open`
    (a stream begins), `add` and `stored` (before and after a batch is kept), `table` (rows are read)."""

    def __init__(self, *deaths: tuple[str, int]) -> None:
        super().__init__()
        self.deaths, self.died = deaths, 0
        self.dead = threading.Event()
        self.wires: tuple[Wire, ...] = ()
        self._seen: Counter[str] = Counter()

    def at(self, event: str) -> None:
        if self.dead.is_set():
            raise FlightUnavailable("it is dead")
        self._seen[event] += 1
        if (event, self._seen[event]) in self.deaths:
            self.died += 1
            self.dead.set()
            for wire in self.wires:
                wire.cut()
            raise FlightUnavailable("it dies")

    def find(self, name: str) -> Kept:
        self.at("find")
        return super().find(name)

    def open(self, name: str, schema: pa.Schema) -> Kept:
        self.at("open")
        return super().open(name, schema)

    def add(self, kept: Kept, batch: pa.RecordBatch) -> bool:
        self.at("add")
        result = super().add(kept, batch)
        self.at("stored")
        return result

    def table(self, name: str, filters: Any, *, indexed: bool = False) -> pa.Table:
        self.at("table")
        return super().table(name, filters, indexed=indexed)


class City:
    """A store behind two wires; where it is mortal, it is begun again on other ports whenever it has died."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._server = LocalServer(store=store)
        self.wires = tuple(Wire(port) for port in self._ports())
        self._over = False
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        if isinstance(store, Mortal):
            store.wires = self.wires
            self._keeper.start()

    def close(self) -> None:
        self._over = True
        if isinstance(self.store, Mortal):
            self.store.dead.set()
            self._keeper.join()
        for wire in self.wires:
            wire.__exit__()
        self._server.close()

    def client(self, timeout: float = 10) -> LongbowClient:
        data, meta = (f"grpc://127.0.0.1:{wire.port}" for wire in self.wires)
        return LongbowClient(data, meta, access=Access(timeout=timeout), retry=QUICK)

    def begin_again(self) -> None:
        self._server.close()
        self.store.restart()
        self._server = LocalServer(store=self.store)
        for wire, port in zip(self.wires, self._ports(), strict=True):
            wire.mend(port)

    def _ports(self) -> list[int]:
        return [int(address.rpartition(":")[2]) for address in (self._server.data, self._server.meta)]

    def _keep(self) -> None:
        assert isinstance(self.store, Mortal)
        while self.store.dead.wait() and not self._over:
            self.begin_again()
            self.store.dead.clear()


@contextmanager
def a_city(store: Store) -> Iterator[City]:
    city = City(store)
    try:
        yield city
    finally:
        city.close()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sinks, "PAUSE", 0.01)
    file = tmp_path / "in.txt"
    file.write_text("\n".join(TEXTS))
    return file


def embedding(path: Path, to: Any, **options: Any) -> Pipeline:
    return pipeline(Encoder(), path, to, **options)  # type: ignore[arg-type]


def until_done(path: Path, city: City) -> Summary:
    """The same command again, as often as it ends with a store that cannot be reached."""
    for _ in range(5):
        try:
            with city.client() as client:
                return embedding(path, client).run()
        except FlightUnavailable:
            continue
    raise AssertionError("it does not get through")


def check_complete(store: Store) -> None:
    """Each text is there once, under its id, with its vector."""
    table = Store.table(store, "d", []).sort_by("id")
    assert table["id"].to_pylist() == list(range(len(TEXTS)))
    assert table["text"].to_pylist() == TEXTS
    wanted = Encoder().embed([list(text.encode()) for text in TEXTS]).vectors
    assert np.array_equal(np.stack(table["vector"].combine_chunks().to_numpy(zero_copy_only=False)), wanted)


BEFORE = [[("find", 1)], [("find", 2)], [("open", 1)], [("add", 1)]]
BETWEEN = [[("stored", 1)], [("add", 2)], [("stored", 4)], [("add", 7)], [("stored", 9)], [("add", 10)], [("stored", 10)]]
RESUMING = [
    [("stored", 2), ("table", 1)],
    [("add", 3), ("table", 2)],
    [("stored", 5), ("open", 2)],
    [("stored", 3), ("add", 4)],
    [("stored", 3), ("stored", 4)],
    [("add", 2), ("table", 1), ("open", 2), ("stored", 6)],
]


@pytest.mark.parametrize(
    ("deaths", "busy"), [*((d, False) for d in (*BEFORE, *BETWEEN, *RESUMING)), *((d, True) for d in BETWEEN[2:5])]
)
def test_a_store_killed_anywhere_has_each_vector_once(path: Path, deaths: list[tuple[str, int]], busy: bool) -> None:
    store = Mortal(*deaths)
    if busy:
        store.hold_index()  # from the first batch on it is indexing, whoever asks
    with a_city(store) as city:
        done = until_done(path, city)
    assert store.died == len(deaths)
    assert (done.vectors, done.finished) == (160, True)
    store.dead.clear()
    check_complete(store)


class Faltering(Store):
    """Calls a function when its fifth batch comes."""

    def __init__(self) -> None:
        super().__init__()
        self.falter = lambda: None
        self._batches = 0

    def add(self, kept: Kept, batch: pa.RecordBatch) -> bool:
        self._batches += 1
        if self._batches == 5:
            self.falter()
        return super().add(kept, batch)


@pytest.mark.parametrize("fault", ["hold", "drip"])
@pytest.mark.parametrize("early", [True, False])
def test_a_store_that_hangs_or_drips_is_left_and_resumed(path: Path, fault: str, early: bool) -> None:
    store = Faltering()
    with a_city(store) as city:

        def spoil() -> None:
            for wire in city.wires:
                getattr(wire, fault)()

        if early:
            spoil()
        else:
            store.falter = spoil
        with city.client(timeout=0.3) as client:
            with pytest.raises(FlightUnavailable, match="did not finish .* within 0.3 s|cannot be reached"):
                embedding(path, client, patience=0.3).run()
        for wire in city.wires:
            wire.flow()
        assert until_done(path, city).finished
        check_complete(city.store)


def test_a_full_store_is_said_to_be_and_resumed_with_more_room(path: Path) -> None:
    with a_city(Store(memory=6000)) as city:
        with city.client(timeout=2) as client, pytest.raises(FlightUnavailable, match="reached its LONGBOW_MAX_MEMORY"):
            embedding(path, client, patience=0.3).run()
        assert 0 < sum(b.num_rows for b in city.store.find("d").batches) < 160
        city.store.memory = None
        city.begin_again()
        assert until_done(path, city).resumed > 0
        check_complete(city.store)


def test_two_runs_of_one_target_are_not_let_run_at_once(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "in.txt").write_text("another text")
    refused = []

    def meanwhile(*_: object) -> None:
        for to in (client, FileSink(tmp_path / "out.parquet")):
            with pytest.raises(RequestError, match="another process is filling (d at 127.0.0.1:|.*out.parquet).*: wait"):
                embedding(other / "in.txt", to).run()
            refused.append(to)

    with a_city(Store()) as city, city.client() as client:
        with pytest.MonkeyPatch.context() as patch:
            held = FileSink(tmp_path / "out.parquet")
            patch.setattr(held, "finish", lambda: embedding(path, client, progress=meanwhile).run())
            embedding(other / "in.txt", held).run()
        (other / "checkpoint").unlink()
        assert len(refused) >= 2
        check_complete(city.store)
        with pytest.raises(RequestError, match="d holds ids from 0 on and there is no checkpoint of this run"):
            embedding(other / "in.txt", client).run()


def interrupted(path: Path, city: City) -> None:
    """A run that is stopped by Ctrl-C when some of it is safe, and the store takes no more."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    city.store.memory = 6000
    with city.client(timeout=2) as client, pytest.raises(KeyboardInterrupt):
        embedding(path, client, progress=stop).run()
    city.store.memory = None
    city.begin_again()


@pytest.mark.parametrize("after", ["an interrupt", "the end"])
def test_a_store_that_lost_its_rows_is_not_filled_from_the_middle(path: Path, after: str) -> None:
    with a_city(Store()) as city:
        if after == "the end":
            until_done(path, city)
        else:
            interrupted(path, city)
        city.store.drop("d")
        with city.client() as client, pytest.raises(FlightDataError, match="d lacks id [0-9]+, the last of [0-9]+ vectors"):
            embedding(path, client).run()
        path.with_name("checkpoint").unlink()
        assert until_done(path, city).sent == 160
        check_complete(city.store)


def test_a_file_that_was_finished_and_is_gone_is_missed(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    embedding(path, FileSink(out)).run()
    assert embedding(path, FileSink(out)).run().sent == 0
    out.unlink()
    with pytest.raises(RequestError, match="out.parquet was finished and is gone: delete the checkpoint"):
        embedding(path, FileSink(out)).run()


class Careless(Store):
    """Its comparison lets every row through, or, where it is `blind`, none."""

    def __init__(self, blind: bool) -> None:
        super().__init__()
        self.blind = blind

    def table(self, name: str, filters: Any, *, indexed: bool = False) -> pa.Table:
        rows = super().table(name, [], indexed=indexed)
        return rows.slice(0, 0) if filters and self.blind else rows


@pytest.mark.parametrize("make", [lambda: Careless(False), lambda: Careless(True), Swapped])
def test_a_store_that_compares_wrongly_is_resumed_all_the_same(path: Path, make: Callable[[], Store]) -> None:
    with a_city(make()) as city:
        interrupted(path, city)
        assert 0 < until_done(path, city).resumed < 160
        check_complete(city.store)
        path.with_name("checkpoint").unlink()
        with city.client() as client, pytest.raises(RequestError, match="d holds ids from 0 on and there is no checkpoint"):
            embedding(path, client).run()
        check_complete(city.store)


class Late(Store):
    """Takes its first batch only when the client has given it up and has seen that it is not there."""

    late: pa.RecordBatch | None = None

    def open(self, name: str, schema: pa.Schema) -> Kept:
        kept = super().open(name, schema)
        if self.late is not None:
            super().add(kept, self.late)
            self.late = None
        return kept

    def add(self, kept: Kept, batch: pa.RecordBatch) -> bool:
        if not kept.batches and self.late is None:
            self.late = batch
            raise FlightUnavailable("it takes too long")
        return super().add(kept, batch)


def test_a_batch_that_was_taken_after_all_is_told(path: Path) -> None:
    with a_city(Late()) as city, city.client() as client:
        with pytest.raises(
            FlightDataError, match="d has 16 ids twice, from 0 to 15: the store took a batch that it had let"
        ):
            embedding(path, client).run()
