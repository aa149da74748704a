"""Files into stores: what arrives, what is resumed, what is never sent twice."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import flight

import quarrel
from quarrel.embed import sinks
from quarrel.embed.checkpoint import Checkpoint, State
from quarrel.embed.pipeline import Layout, Summary
from quarrel.embed.sinks import FileSink
from quarrel.embed.source import Wanted
from quarrel.errors import FlightUnavailable, RequestError
from quarrel.llm import LLM, Chunking
from quarrel.llm.embeddings import EmbedOptions
from tests.embed.support import Town, pipeline
from tests.paths import need_cases

WORDS = ["wind", "north", "cold", "river", "stone", "bird", "night", "fire", "winter", "salt", "garden", "road"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with quarrel.load(need_cases("bert", "model-q4_0x.gguf"), backend="cpu", compute="float32") as made:
        yield made


@pytest.fixture
def town() -> Iterator[Town]:
    made = Town()
    yield made
    made.down()


def some_texts(n: int) -> list[str]:
    rng = random.Random(1)
    return [f"{i} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for i in range(n)]


def text_file(folder: Path, texts: list[str]) -> Path:
    path = folder / "in.txt"
    path.write_text("\n".join(texts), "utf-8")
    return path


def complete(town: Town, llm: LLM, texts: list[str], first: int = 0) -> None:
    """Each text is there once, under its id, with its vector."""
    rows = town.rows()
    assert sorted(rows) == list(range(first, first + len(texts)))
    assert [rows[first + i]["text"] for i in range(len(texts))] == texts
    got = np.array([rows[first + i]["vector"] for i in range(len(texts))], np.float32)
    assert np.array_equal(got, llm.embed(texts).vectors)


def test_a_file_arrives_whole_and_a_second_run_does_nothing(llm: LLM, town: Town, tmp_path: Path) -> None:
    texts = some_texts(100)
    path = text_file(tmp_path, texts)
    seen: list[tuple[int, int, int]] = []
    with town.client() as client:
        done = pipeline(llm, path, client, progress=lambda *at: seen.append(at)).run()
        assert (done.rows, done.sent, done.bad, done.resumed, done.finished) == (100, 100, 0, 0, True)
        assert done.tokens == llm.embed(texts).total_tokens
        again = pipeline(llm, path, client).run()
        assert (again.rows, again.sent, again.resumed, again.finished) == (100, 0, 100, True)
    complete(town, llm, texts)
    assert seen[-1] == (path.stat().st_size, path.stat().st_size, 100)
    assert not (tmp_path / "bad.jsonl").exists()
    assert town.store.find("d").metric == "cosine"


def test_bad_rows_go_to_their_file_and_the_others_arrive(llm: LLM, town: Town, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    long = "wind " * 3000
    lines = [json.dumps({"text": t, "key": f"k{i}", "year": i}) for i, t in enumerate([*some_texts(40), long, "", "last"])]
    path.write_text("\n".join([*lines[:5], "{", *lines[5:]]))
    with town.client() as client:
        done = pipeline(llm, path, client, wanted=Wanted(id="key", others=("year",))).run()
    assert (done.rows, done.sent, done.bad) == (44, 41, 3)
    letters = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [x["row"] for x in letters] == [5, 41, 42]
    assert "it is no JSON" in letters[0]["error"]
    assert "tokens and the context holds" in letters[1]["error"]
    assert len(letters[1]["text"]) == 2000
    assert letters[2]["error"] == "its text is empty"
    rows = town.rows()
    assert [(rows[i]["doc_id"], rows[i]["year"]) for i in (0, 5, 40)] == [("k0", "0"), ("k5", "5"), ("k42", "42")]


def test_long_texts_become_chunks_where_asked(llm: LLM, town: Town, tmp_path: Path) -> None:
    texts = ["wind north", "cold river stone " * 20, "salt"]
    options = EmbedOptions(chunk=Chunking(24, 4), dimensions=8, prefix="x ", normalize=False)
    with town.client() as client:
        done = pipeline(llm, text_file(tmp_path, texts), client, options=options, layout=Layout(50, keep_text=False)).run()
    made = llm.embed(texts, chunk=Chunking(24, 4), dimensions=8, prefix="x ", normalize=False)
    rows = town.rows()
    assert done.sent == len(made) == len(rows) > 3
    assert sorted(rows) == list(range(50, 50 + len(made)))
    assert [rows[50 + i]["doc_id"] for i in range(len(made))] == [str(t) for t in made.texts]
    assert [rows[50 + i]["chunk"] for i in range(len(made))] == [0, *range(len(made) - 2), 0]
    assert np.array_equal(np.array([rows[50 + i]["vector"] for i in range(len(made))], np.float32), made.vectors)
    assert "text" not in rows[50]


def cut_after(patch: pytest.MonkeyPatch, town: Town, batches: int, *, ack: bool, back: bool = True) -> threading.Event:
    """Breaks the stream once so many batches are stored, the last of them acknowledged or not, and closes the ports; they
    open again where the store comes `back`."""
    gone = threading.Event()
    stored = [0]
    real = town.store.add

    def add(kept: Any, batch: pa.RecordBatch) -> bool:
        if gone.is_set():
            raise flight.FlightUnavailableError("connection lost")
        result = real(kept, batch)
        stored[0] += 1
        if stored[0] == batches:
            gone.set()
            if not ack:
                raise flight.FlightUnavailableError("connection lost")
        return result

    patch.setattr(town.store, "add", add)

    def close() -> None:
        gone.wait(60)
        town.down()
        time.sleep(0.2)
        if back:
            patch.setattr(town.store, "add", real)
            town.up()

    threading.Thread(target=close, daemon=True).start()
    return gone


@pytest.mark.parametrize("ack", [True, False])
def test_a_store_that_goes_away_in_mid_stream_loses_and_doubles_nothing(
    llm: LLM, town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ack: bool
) -> None:
    texts = some_texts(200)
    gone = cut_after(monkeypatch, town, 4, ack=ack)
    with town.client() as client:
        done = pipeline(llm, text_file(tmp_path, texts), client).run()
    assert gone.is_set()
    assert done.finished
    complete(town, llm, texts)


def test_a_store_that_stays_away_ends_the_run_and_the_next_one_goes_on(
    llm: LLM, town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = some_texts(160)
    path = text_file(tmp_path, texts)
    with monkeypatch.context() as patch, town.client() as client:
        gone = cut_after(patch, town, 3, ack=True, back=False)
        with pytest.raises(FlightUnavailable):
            pipeline(llm, path, client, patience=0.5).run()
        assert gone.is_set()
    town.up()
    with town.client() as client:
        done = pipeline(llm, path, client).run()
    assert done.finished
    complete(town, llm, texts)


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupt_anywhere_is_resumed(
    llm: LLM, town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    texts = [*some_texts(60), " ", *some_texts(60)]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    rng, runs = random.Random(seed), 0
    while True:
        runs += 1
        left = [rng.randint(0, 4)]

        def stop(*_: object, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        try:
            with town.client() as client:
                done: Summary = pipeline(llm, path, client, progress=stop if runs < 6 else None, size=10).run()
            break
        except KeyboardInterrupt:
            continue
    assert runs > 1
    assert done.finished
    complete(town, llm, [t for t in texts if t.strip()])
    letters = (tmp_path / "bad.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in letters] == [60]


def test_ids_that_are_taken_are_refused_without_a_checkpoint(llm: LLM, town: Town, tmp_path: Path) -> None:
    path = text_file(tmp_path, some_texts(20))
    with town.client() as client:
        pipeline(llm, path, client).run()
        (tmp_path / "checkpoint").unlink()
        with pytest.raises(RequestError, match="d holds ids from 0 on and there is no checkpoint .*--first-id 20"):
            pipeline(llm, path, client).run()
        assert pipeline(llm, path, client, layout=Layout(20)).run().sent == 20
    assert sorted(town.rows()) == list(range(40))


def test_a_lost_checkpoint_save_is_made_good_by_asking_the_store(llm: LLM, town: Town, tmp_path: Path) -> None:
    texts = some_texts(90)
    path = text_file(tmp_path, texts)
    with town.client() as client:
        pipeline(llm, path, client).run()
        saved = Checkpoint(tmp_path / "checkpoint", {"input": str(path)})
        saved.save(State(rows=32, sent=32))
        done = pipeline(llm, path, client).run()
    assert (done.present, done.sent, done.finished) == (58, 58, True)
    complete(town, llm, texts)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_file_gets_all_rows_also_in_parts(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(sinks, "PART_ROWS", 32)
    texts = some_texts(150)
    path, out = text_file(tmp_path, texts), tmp_path / f"out{suffix}"
    calls = [0]

    def stop(*_: object) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline(llm, path, FileSink(out), progress=stop).run()
    assert not out.exists()
    done = pipeline(llm, path, FileSink(out)).run()
    assert 0 < done.resumed < 150
    table = pq.read_table(out) if suffix == ".parquet" else pa.ipc.open_file(out).read_all()
    assert table["id"].to_pylist() == list(range(150))
    assert table["text"].to_pylist() == texts
    assert np.array_equal(np.stack(table["vector"].to_numpy()), llm.embed(texts).vectors)
    assert not (tmp_path / f"out{suffix}.parts").exists()
    assert pipeline(llm, path, FileSink(out)).run().sent == 0
    (tmp_path / "checkpoint").unlink()
    with pytest.raises(RequestError, match="exists and there is no checkpoint"):
        pipeline(llm, path, FileSink(out)).run()


def test_a_file_of_no_good_rows(llm: LLM, town: Town, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("{\n{\n")
    done = pipeline(llm, path, FileSink(tmp_path / "out.parquet")).run()
    assert (done.rows, done.sent, done.bad, done.finished) == (2, 0, 2, True)
    path.write_text("")
    (tmp_path / "checkpoint").unlink()
    with town.client() as client:
        assert pipeline(llm, path, client).run().rows == 0


def test_a_fault_of_the_input_ends_the_run_with_what_was_sent_saved(llm: LLM, town: Town, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("body\na\n")
    with town.client() as client, pytest.raises(RequestError, match="has no column 'text'"):
        pipeline(llm, path, client).run()
    assert not any(t.name == "quarrel-embed-read" for t in threading.enumerate())


def test_a_checkpoint_of_another_run_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "c"
    Checkpoint(path, {"model": "a"}).save(State(rows=3))
    assert Checkpoint(path, {"model": "a"}).load() == State(rows=3)
    with pytest.raises(RequestError, match="is of another run .model was 'a', is 'b'.: delete it"):
        Checkpoint(path, {"model": "b"}).load()
    for bad in ("", "{", "[]", '{"job": {}, "state": {"x": 1}}'):
        path.write_text(bad)
        with pytest.raises(RequestError, match="cannot be read: delete it"):
            Checkpoint(path, {}).load()
