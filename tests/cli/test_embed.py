"""`quarrel embed`, `search` and `flight-server`: whole processes, killed ones, and the search of a real model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import quarrel
from quarrel.cli import main
from quarrel.flight import LongbowClient, vector_batch
from tests.cli.support import ROOT, spawn
from tests.embed.support import Town
from tests.paths import CASES, need_cases

CORPUS = CASES.parent / "corpus" / "wikitext-2-test.txt"


@pytest.fixture
def town() -> Iterator[Town]:
    made = Town()
    yield made
    made.down()


@pytest.fixture(scope="module")
def small() -> str:
    return str(need_cases("bert", "model-q4_0x.gguf"))


def lines_file(folder: Path, lines: list[str]) -> Path:
    path = folder / "in.txt"
    path.write_text("\n".join(lines), "utf-8")
    return path


def test_an_option_that_the_model_cannot_have_is_refused_and_leaves_nothing_behind(
    town: Town, tmp_path: Path, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines_file(tmp_path, ["a text"])
    embed = ["embed", "-m", small, "-i", str(path), "--to", str(tmp_path / "out.parquet"), "--backend", "cpu", "-q"]
    for wrong in (["--dimensions", "9999"], ["--chunk", "9999"], ["--rope-scale", "0"], ["--threads", "0"]):
        assert main([*embed, *wrong]) == 1
        assert capsys.readouterr().err.startswith(
            f"quarrel: {wrong[0]}" if wrong[0] != "--chunk" else "quarrel: chunks are"
        )
        assert [p.name for p in tmp_path.iterdir()] == ["in.txt"]
    assert main(embed) == 0

    search = ["search", "-m", small, "x", "--from", town.data, "--meta", town.meta, "--dataset", "d", "--backend", "cpu"]
    assert main(search) == 1
    assert capsys.readouterr().err.startswith("quarrel: there is no dataset 'd' in the store at grpc://")
    assert main([*embed[:6], town.data, "--meta", town.meta, "--dataset", "d", *embed[7:]]) == 0
    assert main([*search, "--rope-scale", "0"]) == 1
    assert capsys.readouterr().err.startswith("quarrel: --rope-scale is 0.0")


def test_eight_hundred_passages_of_the_corpus_are_found_where_numpy_finds_them(
    town: Town, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not CORPUS.exists():
        pytest.skip("the corpus is not beside the checkout")
    model = str(need_cases("minilm", "all-MiniLM-L6-v2-q8_0.gguf"))
    sentences = re.findall(r"[A-Z][^.=\n]{30,80} \.", CORPUS.read_text("utf-8"))[:800]
    assert len(sentences) == 800
    path = lines_file(tmp_path, sentences)
    command = ["embed", "-m", model, "-i", str(path), "--to", town.data, "--meta", town.meta, "--dataset", "d"]
    assert main([*command, "--backend", "cpu"]) == 0
    assert "800 rows: 800 vectors of" in capsys.readouterr().err
    with quarrel.load(model, backend="cpu") as llm, town.client() as client:
        client.wait_ready("d", 800)
        rows = town.rows()
        stored = np.array([rows[i]["vector"] for i in range(800)], np.float32)
        # The same words in another order and case stand for a paraphrase: another text, near its original.
        asked = [" ".join(reversed(s.lower().split())) for s in sentences[::40]]
        queries = llm.embed(asked).vectors
        for query in queries:
            wanted = np.argsort(1 - stored @ query, kind="stable")[:5].tolist()
            assert client.search("d", query, 5).ids.tolist() == wanted
        nearest = [int(np.argmax(stored @ q)) for q in queries]
        assert sum(n == 40 * i for i, n in enumerate(nearest)) >= 18
    assert (
        main(["search", "-m", model, "--from", town.data, "--meta", town.meta, "--dataset", "d", asked[3], "-k", "2"]) == 0
    )
    first = capsys.readouterr().out.splitlines()[0]
    assert sentences[120][:30] in first


def test_a_killed_run_is_resumed_with_nothing_lost_or_doubled(small: str, town: Town, tmp_path: Path) -> None:
    texts = [f"wind north {i} " + "river " * (i % 8) for i in range(1200)]
    path = lines_file(tmp_path, texts)
    command = ("embed", "-m", small, "-i", str(path), "--to", town.data, "--meta", town.meta, "--dataset", "d")
    options = ("--block", "32", "--backend", "cpu", "--compute", "float32")
    kills = 0
    for _ in range(2):
        before = len(town.rows()) if "d" in town.store.names() else 0
        with spawn(*command, *options) as process:
            end = time.monotonic() + 30
            while process.poll() is None and time.monotonic() < end:
                if "d" in town.store.names() and len(town.rows()) > before + 200:
                    break
                time.sleep(0.01)
            if process.poll() is None:
                process.kill()
                kills += 1
    assert kills >= 1
    with spawn(*command, *options, "--json") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err.decode()
    done = json.loads(out)
    assert done["finished"]
    assert done["resumed"] > 0
    rows = town.rows()
    assert sorted(rows) == list(range(1200))
    assert [rows[i]["text"] for i in range(1200)] == texts


def test_bad_rows_give_status_3_and_a_json_summary(
    small: str, town: Town, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"body": "wind", "key": "a"}\n{"body": 5, "key": "b"}\n')
    out = tmp_path / "out.parquet"
    command = ["embed", small, "-i", str(path), "--to", str(out), "--text-column", "body", "--id-column", "key", "--json"]
    assert main(command) == 3
    said = json.loads(capsys.readouterr().out)
    assert (said["rows"], said["sent"], said["bad"], said["finished"]) == (2, 1, 1, True)
    assert json.loads(Path(said["dead_letters"]).read_text())["error"] == "its body is int, wanted a text"
    assert pq.read_table(out)["doc_id"].to_pylist() == ["a"]
    assert main(command) == 3


def test_search_tells_hits_as_json_and_by_filters(
    small: str, town: Town, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text,year\nwind north,1990\nriver stone,2001\nwind south,2010\n")
    where = ["--meta", town.meta, "--dataset", "d"]
    assert main(["embed", small, "-i", str(path), "--to", town.data, *where, "--column", "year", "-q"]) == 0
    search = ["search", small, "wind north", "--from", town.data, *where]
    assert main([*search, "--json"]) == 0
    hits = json.loads(capsys.readouterr().out)["hits"]
    assert (hits[0]["text"], hits[0]["id"], hits[0]["year"]) == ("wind north", 0, "1990")
    assert abs(hits[0]["score"] - 1) < 1e-3
    assert abs(hits[0]["cosine"] - 1) < 1e-5
    assert abs(hits[0]["distance"]) < 1e-3
    town.store.kind = True  # whose scores are 1 - cosine
    assert main([*search, "--json", "--fresh"]) == 0
    for hit in json.loads(capsys.readouterr().out)["hits"]:
        assert abs(hit["distance"] ** 2 - 2 * (1 - hit["cosine"])) < 1e-3
    town.store.kind = False
    assert len(hits) == 3
    assert main(search) == 0
    assert capsys.readouterr().out.split()[:2] == ["1.0000", "0"]
    assert main([*search, "--json", "--filter", "year>=2000", "--fresh", "-k", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["hits"][0]["year"] in ("2001", "2010")


def test_vectors_of_any_length_are_ranked_by_their_cosines(
    small: str, town: Town, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines_file(tmp_path, ["wind north", "river", "wind south river stone winter", "salt road"])
    where = ["--meta", town.meta, "--dataset", "d", "--backend", "cpu", "--no-normalize"]
    assert main(["embed", small, "-i", str(path), "--to", town.data, *where]) == 0
    assert (
        "Longbow ranks by L2, whatever --metric says: search vectors like these by --rerank cosine"
        in capsys.readouterr().err
    )
    rows = town.rows()
    search = ["search", small, "wind north", "--from", town.data, *where, "--json"]
    for rerank, measure in (([], "cosine"), (["--rerank", "dot_product"], "dot_product")):
        assert main([*search, *rerank]) == 0
        said = json.loads(capsys.readouterr().out)
        vectors = {i: np.array(row["vector"]) for i, row in rows.items()}
        products = {i: float(vectors[0] @ v) for i, v in vectors.items()}
        cosines = {i: products[i] / float(np.linalg.norm(v) * np.linalg.norm(vectors[0])) for i, v in vectors.items()}
        scores = cosines if measure == "cosine" else products
        assert said["ranked_by"] == measure
        assert [hit["id"] for hit in said["hits"]] == sorted(scores, key=lambda i: -scores[i])
        assert all(abs(hit["cosine"] - cosines[hit["id"]]) < 1e-4 for hit in said["hits"])


def test_embed_waits_for_the_index_and_says_how_far_it_is(
    small: str, town: Town, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines_file(tmp_path, [f"wind {i}" for i in range(40)])
    embed = ["embed", small, "-i", str(path), "--to", town.data, "--meta", town.meta, "--dataset", "d", "--backend", "cpu"]
    town.store.hold_index()
    assert main(embed) == 0
    assert "indexed" not in capsys.readouterr().err
    look = town.store.readiness

    def readiness(name: str) -> dict[str, object]:
        said = look(name)
        town.store.let_index()
        return said

    town.store.readiness = readiness  # type: ignore[method-assign]
    assert main([*embed, "--wait"]) == 0
    said = capsys.readouterr().err
    assert "indexing: 0 of 40 vectors (" in said
    assert "40 vectors are indexed" in said
    assert town.store.readiness("d") == {"status": "READY", "index_len": 40}
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert main([*embed[:3], str(empty), *embed[4:-3], "empty", *embed[-2:], "--wait"]) == 0  # there is nothing to wait for
    assert "0 rows" in capsys.readouterr().err


def test_datasets_are_listed_described_exported_and_deleted(
    town: Town, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--from", town.data, "--meta", town.meta]

    def told(*arguments: str) -> Any:
        assert main(["datasets", *arguments, *where, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert told("list") == []
    with town.client() as client:
        vectors = np.eye(10, 16, dtype=np.float32)
        for name in ("notes", "other"):
            client.ingest(name, vector_batch(range(10), vectors, columns={"year": range(1990, 2000)}))
    assert [(d["name"], d["batches"]) for d in told("list")] == [("notes", 1), ("other", 1)]
    assert [d["name"] for d in told("list", "ote")] == ["notes"]
    info = told("info", "notes")
    assert (info["status"], info["indexed"]) == ("READY", 10)
    assert info["columns"] == {"id": "int64", "vector": "fixed_size_list<item: float>[16]", "year": "int64"}
    assert told("delete", "notes", "--id", "3") == {"deleted": "notes", "id": "3"}
    for suffix, read in ((".parquet", pq.read_table), (".arrow", lambda p: pa.ipc.open_file(p).read_all())):
        out = tmp_path / f"out{suffix}"
        assert told("export", "notes", "--output", str(out), "--filter", "year>=1992")["rows"] == 7
        assert read(out)["year"].to_pylist() == [1992, *range(1994, 2000)]
    assert told("export", "notes", "--output", str(tmp_path / "none.parquet"), "--filter", "year<1")["rows"] == 0
    assert pq.read_table(tmp_path / "none.parquet").column_names == ["id", "vector", "year"]
    assert told("delete", "notes")["deleted"] == "notes"
    assert main(["datasets", "list", *where]) == 0
    assert re.fullmatch(r" *name +batches +size\n +other +1 +\d+ B\n", capsys.readouterr().out)
    assert main(["datasets", "info", "other", *where]) == 0
    assert "READY, 10 rows indexed" in capsys.readouterr().out
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".arrow", ".parquet", ".parquet"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["list", "--id", "3"], 2, "--id is of delete, not of list"),
        (["info"], 2, "info wants the name of a dataset"),
        (["delete", "d", "--output", "x.arrow"], 2, "--output is of export, not of delete"),
        *(
            (([action, "none", "--output", "x.arrow"][: 4 if action == "export" else 2]), 1, "there is no dataset 'none'")
            for action in ("info", "delete", "export")
        ),
        (["delete", "d", "--id", "77"], 1, "there is no such row in 'd'"),
        (["export", "d"], 2, "--output is None, wanted a file that ends in .parquet"),
        (["export", "d", "--output", "x.csv"], 2, "--output is 'x.csv'"),
        (["export", "d", "--output", "taken.arrow"], 1, "taken.arrow exists: move it away"),
        (["export", "d", "--output", "no/such.arrow"], 1, "No such file or directory"),
        (["export", "d", "--output", "x.arrow", "--filter", "a"], 2, "--filter takes a column"),
        (["export", "d", "--output", "x.arrow", "--filter", "a=1"], 1, "there is no column 'a'"),
        (["drop", "d"], 2, "invalid choice: 'drop'"),
    ],
)
def test_what_datasets_cannot_do_is_one_sentence(
    town: Town,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.arrow").touch()
    with town.client() as client:
        client.ingest("d", vector_batch([1], np.ones((1, 4), np.float32)))
    assert main(["datasets", *arguments, "--from", town.data, "--meta", town.meta]) == status
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["taken.arrow"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["embed"], 2, "name a file by --input and where its vectors go by --to"),
        (["embed", "-i", "IN", "--to", "x.doc"], 2, "wanted grpc://host:port or a file that ends in .parquet"),
        (["embed", "-i", "IN", "--to", "grpc://127.0.0.1:1"], 2, "name one by --dataset"),
        (["embed", "-i", "IN", "--to", "grpc://host", "--dataset", "d"], 2, "has no port; write grpc://host:3000"),
        (["embed", "-i", "IN", "--to", "grpc://h:1", "--dataset", "d", "--header", "x"], 2, "--header takes NAME=VALUE"),
        (["embed", "-i", "IN", "--to", "o.parquet", "--overlap", "3"], 2, "--overlap is of chunks"),
        (["embed", "-i", "IN", "--to", "o.parquet", "--block", "0"], 2, "--block is 0, wanted 1 to 65536"),
        (["embed", "-i", "IN", "--to", "o.parquet", "--first-id", "-1"], 2, "--first-id is -1"),
        (["embed", "-i", "NONE.txt", "--to", "o.parquet"], 1, "NONE.txt: No such file or directory"),
        (["embed", "-i", "IN", "--to", "o.parquet", "--dimensions", "9999"], 1, "dimensions is 9999"),
        (["embed", "-i", "IN", "--to", "o.parquet", "--chunk", "9999"], 1, "chunks are 9999 tokens long"),
        (["search", "wind", "--dataset", "d", "--filter", "year"], 2, "--filter takes a column, a comparison and a value"),
        (["search", "wind", "--dataset", "d", "--header", "x=\u00fc"], 2, "--header takes NAME=VALUE in printable ASCII"),
        (["search", "wind", "--dataset", "d", "--header", "a b=c"], 2, "--header takes NAME=VALUE in printable ASCII"),
        (["search", "wind", "--from", "grpc://127.0.0.1:1", "--dataset", "d"], 1, "cannot be reached for info"),
        (
            ["search", "wind", "--from", "grpc://:3000", "--dataset", "d"],
            1,
            "the address is 'grpc://:3000', wanted one such as",
        ),
        (
            ["embed", "-i", "IN", "--to", "o.parquet", "--wait"],
            2,
            "--wait is for the index of a store, and o.parquet is none",
        ),
        (["flight-server", "--port", "99999"], 2, "a port is 99999"),
        (["flight-server", "--memory", "80%"], 2, "--memory is '80%', wanted bytes such as 512MiB"),
        (["flight-server", "--memory", "x"], 2, "--memory is 'x'"),
        (["flight-server", "--index-rate", "0"], 2, "--index-rate is 0, wanted rows above 0"),
        (["flight-server", "--kind", "--faithful"], 2, "not allowed with"),
        (["flight-server", "--host", "no.such.host.invalid", "--port", "0"], 1, "cannot be opened"),
    ],
)
def test_errors_are_one_sentence(
    small: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = lines_file(tmp_path, ["wind"])
    given = [str(path) if a == "IN" else a for a in arguments]
    assert main([*given, "-m", small] if arguments[0] != "flight-server" else given) == status
    error = capsys.readouterr().err
    assert said in error
    assert len([line for line in error.splitlines() if line.startswith("quarrel")]) == 1
    assert "Traceback" not in error


@pytest.mark.parametrize("caller", ["none", "gone", "staying"])
def test_the_stand_in_says_where_it_is_and_ends_by_ctrl_c(caller: str) -> None:
    from pyarrow import flight

    with spawn("flight-server", "--port", "0", "--json") as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert said["stand_in"] is True
            if caller != "none":
                with LongbowClient(said["data"], said["meta"]) as client:
                    assert client.list() == []
            if caller == "staying":
                store = flight.FlightClient(said["data"])
                writer, _ = store.do_exchange(flight.FlightDescriptor.for_path("ingest", "d"))
                writer.begin(pa.schema({"id": pa.int64(), "vector": pa.list_(pa.float32(), 2)}))
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130
    assert b"Traceback" not in err
    if caller == "staying":
        with pytest.raises((pa.ArrowException, OSError)):
            writer.close()


def test_without_pyarrow_it_is_said_what_to_install(small: str, tmp_path: Path) -> None:
    path = lines_file(tmp_path, ["wind"])
    code = (
        "import importlib.metadata as m, sys\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name == 'pyarrow':\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "from quarrel.cli import main\n"
        f"sys.exit(main(['embed', {small!r}, '-i', {str(path)!r}, '--to', 'x.parquet']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "pip install 'longbow-quarrel[flight]'" in done.stderr
