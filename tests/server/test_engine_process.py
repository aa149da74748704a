"""The process of a model is killed: the server stays up, says what happened, and starts another one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from quarrel.errors import EngineLost
from quarrel.llm import LoadOptions
from quarrel.process import RemoteLLM, open_remote
from quarrel.server import Rates, Settings, models
from quarrel.server.entries import Entry
from quarrel.server.errors import Refused
from quarrel.server.models import ModelManager
from tests.paths import need_cases
from tests.server.conftest import Live, running
from tests.slowly import SLOW, started_with
from tests.test_metrics import TIMED

LONG = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True}


def far(source: str) -> RemoteLLM:
    return open_remote(source, LoadOptions(backend="cpu", threads=2, max_seqs=8))


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("far"), rates=Rates(requests=0, streams=0))
    with pytest.MonkeyPatch.context() as monkeypatch:
        started_with(monkeypatch, SLOW)
        with running(settings, far) as made:
            made.client.post("/api/models/demo")
            yield made


def entry(made: Live) -> Entry:
    return made.server.dispatcher.models.entry("demo")


def process(made: Live) -> RemoteLLM:
    loaded = entry(made).loaded
    assert loaded is not None
    assert isinstance(loaded.llm, RemoteLLM)
    return loaded.llm


def soon(what: Any, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(what())


def test_killed_under_load_it_is_started_again_and_nobody_hangs(made: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[list[str]] = []
    codes: list[int] = []
    begun = threading.Semaphore(0)

    def read() -> None:
        with httpx.stream("POST", f"{made.url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as answer:
            rows: list[str] = []
            for line in answer.iter_lines():
                rows.append(line)
                if len(rows) == 1:
                    begun.release()
        streams.append(rows)

    def ask() -> None:
        codes.append(httpx.post(f"{made.url}/api/generate", json=LONG, timeout=60).status_code)

    old = process(made).pid
    threads = [threading.Thread(target=each) for each in [read] * 6 + [ask] * 2]
    for each in threads:
        each.start()
    for _ in range(6):
        assert begun.acquire(timeout=60)
    started_with(monkeypatch, "import time\ntime.sleep(2)\n")  # so that it is seen to be gone
    os.kill(old, signal.SIGKILL)
    assert soon(lambda: made.client.get("/readyz").status_code == 503)
    assert made.client.get("/readyz").json()["checks"]["server"] == "running"
    health = [made.client.get("/healthz").status_code for _ in range(5)]
    # A request while it is loaded again waits, and is served.
    after = made.client.post("/api/generate", json={"prompt": "a", "max_tokens": 2})
    for each in threads:
        each.join(60)
    assert not any(each.is_alive() for each in threads)
    assert health == [200] * 5
    assert after.status_code == 200
    assert made.client.get("/readyz").status_code == 200
    assert process(made).pid != old
    assert entry(made).restarts == 1
    assert len(streams) == 6
    for rows in streams:
        events = [json.loads(r.removeprefix("data: ")) for r in rows if r and r != "data: [DONE]"]
        assert rows[-2:] == ["data: [DONE]", ""] or rows[-1] == "data: [DONE]"
        assert events[-1].get("error", {}).get("code") == "engine_lost" or events[-1]["choices"][0]["finish_reason"]
    assert any("engine_lost" in r for rows in streams for r in rows)
    assert set(codes) <= {200, 503}
    assert 'quarrel_engine_process_restarts_total{model="demo"} 1.0' in made.client.get("/metrics").text


def test_one_that_does_not_hold_is_started_later_and_later(made: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SOONEST", 3.0)
    before = entry(made).restarts
    os.kill(process(made).pid, signal.SIGKILL)
    assert soon(lambda: entry(made).restarts > before)
    answer = made.client.post("/api/generate", json={"prompt": "a", "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ENGINE_ERROR")
    assert int(answer.headers["retry-after"]) >= 1
    assert soon(lambda: made.client.get("/readyz").status_code == 200)


def test_its_layers_are_in_the_server_s_metrics(tmp_path: Path) -> None:
    """Of a model with two layers of experts, 3 of which a token takes, and two of Mamba-2."""
    path = str(need_cases("nemotron_h_moe", "model-q4_0x.gguf"))
    settings = Settings(data_dir=tmp_path, rates=Rates(requests=0, streams=0), models=(path,), n_ctx=64)
    options = LoadOptions(backend="cpu", threads=2, max_seqs=8, profile_steps=1)
    with running(settings, lambda source: open_remote(source, options)) as made:
        name = made.server.dispatcher.models.entries()[0].name

        def found() -> dict[str, float]:
            rows = (row for row in made.client.get("/metrics").text.splitlines() if f'model="{name}"' in row)
            sums: dict[str, float] = {}
            for row in rows:  # over layers and experts
                key = row.partition("{")[0]
                sums[key] = sums.get(key, 0.0) + float(row.rpartition(" ")[2])
            return sums

        answer = made.client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 5
        steps, tokens = 5, 3 + 4
        assert soon(lambda: [found()[f"{metric}_count"] for metric in TIMED] == [steps * 2] * 4), found()
        assert all(found()[f"{metric}_sum"] > 0 for metric in TIMED)
        assert found()["quarrel_ssm_state_size"] > 0
        assert found()["quarrel_ssm_divergence"] == 0
        assert soon(lambda: found().get("quarrel_moe_expert_selection", 0) == tokens * 2 * 3), found()


@pytest.mark.parametrize("stream", [True, False])
def test_blocks_of_a_caller_that_vanished_are_back_within_a_step(made: Live, stream: bool) -> None:
    llm = process(made)
    assert soon(lambda: not llm.activity().running)
    ends = llm.stats().ends["cancelled"]
    body = json.dumps({**LONG, "n": 8, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", made.port)) as gone:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        gone.sendall(head + body)
        assert soon(lambda: llm.activity().running)
    assert soon(lambda: llm.stats().ends["cancelled"] == ends + 8)
    assert llm.activity().running == 0
    assert llm.activity().free_blocks + llm.activity().kept_blocks == llm.activity().n_blocks


def test_it_ends_with_the_server(tmp_path: Path) -> None:
    with running(Settings(data_dir=tmp_path), far) as made:
        made.client.post("/api/models/demo")
        llm = process(made)
        fresh = made.client.post("/api/models/demo", params={"reload": True}).json()
        assert fresh["loaded"]
        assert process(made).pid != llm.pid
        assert soon(lambda: not llm.running)
        llm = process(made)
    assert not llm.running


def test_a_process_that_speaks_otherwise_is_refused_with_a_sentence(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def other(hint: Any, data: Any) -> Any:
        raise KeyError("a field of another version")

    monkeypatch.setattr("quarrel.process.remote.typed", other)
    with pytest.raises(EngineLost, match="restart this program"):
        far("demo")


def test_a_model_that_fails_to_load_for_no_known_reason_is_an_answer(tmp_path: Path) -> None:
    def broken(source: str) -> RemoteLLM:
        raise ZeroDivisionError

    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0)), broken) as made:
        answer = made.client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500
        assert "see the server's log" in answer.json()["error"]["message"]
        assert entry(made).state == "failed"


def test_loading_is_stopped_at_once_and_whoever_waits_is_told() -> None:
    async def stopped() -> None:
        begun, goes, closed = threading.Event(), threading.Event(), threading.Event()

        class Late:
            def close(self) -> None:
                closers.append(threading.get_ident())
                closed.set()

        closers: list[int] = []

        def slow(source: str) -> Any:
            begun.set()
            goes.wait(60)
            return Late()

        models = ModelManager(["demo"], None, slow)
        waiting = asyncio.create_task(models.load("demo"))
        assert await asyncio.to_thread(begun.wait, 60)
        models.stop_loading()
        with pytest.raises(Refused, match="going down") as refusal:
            await asyncio.wait_for(waiting, 50)
        assert refusal.value.status == 503
        goes.set()  # what comes too late is closed
        assert await asyncio.to_thread(closed.wait, 60)
        assert threading.get_ident() not in closers  # it may take seconds, and this thread answers others
        with pytest.raises(Refused, match="going down"):
            await models.load("demo")

    asyncio.run(stopped())


def test_a_process_that_still_loads_is_ended_with_its_loading() -> None:
    stop: Future[None] = Future()
    stop.set_result(None)
    with pytest.raises(EngineLost, match="was stopped"):
        open_remote("demo", LoadOptions(backend="cpu", threads=1), stop=stop)
