"""The /api routes, health, metrics, the models' life, and Ollama's API by Ollama's own client."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import ollama
import pytest

import quarrel
from quarrel.llm import LLM
from quarrel.server import Rates, Settings, build
from tests.server.conftest import Live, load, running
from tests.slowly import step_slowly

DEMO = Path(quarrel.__file__).parent / "demo" / "quarrel-demo-11M-Q8_0.gguf"


def test_a_generation_in_one_piece_as_lines_and_as_events(live: Live) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    whole = live.client.post("/api/generate", json=body).json()
    assert (whole["tokens_generated"], whole["finish_reason"], whole["prompt_tokens"]) == (8, "length", 5)
    lines = live.client.post("/api/generate", json={**body, "stream": True}).text.splitlines()
    events = live.client.post("/api/stream", json={**body, "topk": 40, "topp": 0.9}).text.split("\n\n")
    for rows in (map(json.loads, lines), (json.loads(e.removeprefix("data: ")) for e in events if e)):
        found = list(rows)
        assert "".join(r["token"] for r in found) == whole["text"]
        assert [r["complete"] for r in found] == [False] * (len(found) - 1) + [True]
        assert found[-1]["finish_reason"] == "length"


def test_tokens_there_and_back(live: Live) -> None:
    ids = live.client.post("/api/tokenize", json={"text": "The king"}).json()["tokens"]
    loaded = live.server.dispatcher.models.entry("demo").loaded
    assert loaded is not None
    assert ids == loaded.llm.tokenize("The king")
    assert "The king" in live.client.post("/api/detokenize", json={"tokens": ids}).json()["text"]


def test_health_version_and_models(live: Live) -> None:
    assert live.client.get("/healthz").json() == live.client.get("/api/health").json() == {"status": "ok"}
    live.client.post("/api/generate", json={"prompt": "a", "max_tokens": 1})
    ready = live.client.get("/readyz")
    assert (ready.status_code, ready.json()["checks"]) == (200, {"server": "running", "model": "loaded"})
    assert live.client.get("/version").json()["version"] == quarrel.__version__
    (model,) = live.client.get("/api/models").json()["models"]
    assert (model["name"], model["loaded"], model["architecture"], model["context_length"]) == ("demo", True, "llama", 512)
    assert live.client.get("/api/models/demo").json()["memory_usage"] > 10**7
    assert (model["quantization"], 10**7 < model["parameters"] < 2 * 10**7) == ("Q8_0", True)
    assert live.client.get("/api/models/none").status_code == 404


def test_health_as_llama_server_has_it(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(source: str) -> LLM:
        begun.set()
        assert go_on.wait(60)
        return load(source)

    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0)), slow) as made:
        loading = threading.Thread(target=lambda: made.client.post("/api/models/demo"))
        loading.start()
        assert begun.wait(60)
        answer = made.client.get("/health")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "Loading model")
        go_on.set()
        loading.join(60)
        answer = made.client.get("/health")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        made.server.dispatcher.models.entry("demo").state = "failed"
        assert made.client.get("/health").status_code == 503


def test_metrics_have_their_names_and_count(live: Live) -> None:
    def value(name: str) -> float:
        rows = [r for r in live.client.get("/metrics").text.splitlines() if r.startswith(name)]
        return sum(float(r.rsplit(" ", 1)[1]) for r in rows)

    before = value('quarrel_webui_http_requests_total{endpoint="/v1/models"')
    live.client.get("/v1/models")
    assert value('quarrel_webui_http_requests_total{endpoint="/v1/models"') == before + 1
    text = live.client.get("/metrics").text
    for name in ("connections_active", "errors_total", "inference_queue_size", "models_loaded", "model_memory_bytes"):
        assert f"quarrel_webui_{name}" in text or name == "errors_total"
    live.client.get("/nowhere/secret-path")
    assert "secret-path" not in live.client.get("/metrics").text


def test_a_model_is_unloaded_loaded_and_swapped_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step_slowly(monkeypatch, 0.005)
    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0))) as made:
        models = made.server.dispatcher.models
        assert made.client.post("/api/models/demo").json()["loaded"]
        old = models.entry("demo").loaded
        assert old is not None
        got: list[dict[str, Any]] = []
        body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "seed": 5}
        thread = threading.Thread(target=lambda: got.append(made.client.post("/api/generate", json=body).json()))
        thread.start()
        while not old.users:
            time.sleep(0.005)
        assert made.client.post("/api/models/demo", params={"reload": True}).json()["loaded"]
        fresh = models.entry("demo").loaded
        assert fresh is not old
        thread.join(60)
        assert got[0]["tokens_generated"] == 300
        again = made.client.post("/api/generate", json=body).json()
        assert again["text"] == got[0]["text"]
        assert not made.client.delete("/api/models/demo").json()["loaded"]
        assert made.client.post("/api/generate", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    with running(Settings(data_dir=tmp_path, models=("demo", "/no/such.gguf"), rates=Rates(requests=0))) as made:
        answer = made.client.post("/v1/completions", json={"model": "such", "prompt": "a"})
        assert answer.status_code == 404
        assert "no/such.gguf" in answer.json()["error"]["message"]
        states = {m["name"]: m["state"] for m in made.client.get("/api/models").json()["models"]}
        assert states == {"demo": "unloaded", "such": "failed"}


def test_the_files_of_a_folder_are_offered(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").symlink_to(DEMO)
    for shard in ("z-00001-of-00002.gguf", "z-00002-of-00002.gguf"):
        (tmp_path / shard).write_bytes(b"GGUF")
    with running(Settings(data_dir=tmp_path, models=(), models_dir=tmp_path, rates=Rates(requests=0))) as made:
        assert [m["id"] for m in made.client.get("/v1/models").json()["data"]] == ["small", "z-00001-of-00002"]
        assert made.client.post("/api/generate", json={"prompt": "a", "max_tokens": 2}).json()["model"] == "small"


def blocks_are_back(llm: LLM) -> bool:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        activity = llm.activity()
        if not activity.running and not activity.waiting:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_that_goes_away_ends_its_work(live: Live, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step_slowly(monkeypatch, 0.003)
    live.client.post("/api/generate", json={"prompt": "a", "max_tokens": 1})
    loaded = live.server.dispatcher.models.entry("demo").loaded
    assert loaded is not None
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 500, "n": 8, "ignore_eos": True, "stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    ends = loaded.llm.stats().ends["cancelled"]
    with socket.create_connection(("127.0.0.1", live.port)) as made:
        made.sendall((head + body).encode())
        while not loaded.llm.activity().running:
            time.sleep(0.002)
    assert blocks_are_back(loaded.llm)
    assert loaded.llm.stats().ends["cancelled"] == ends + 8, "none was run to its end"
    assert not loaded.users


def test_a_full_queue_is_refused_with_a_time_to_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step_slowly(monkeypatch, 0.003)

    def narrow(source: str) -> LLM:
        return quarrel.load(source, backend="cpu", threads=1, max_seqs=1)

    with running(Settings(data_dir=tmp_path, queue=2, max_seqs=1, rates=Rates(requests=0)), narrow) as made:
        body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
        made.client.post("/api/generate", json={"prompt": "a", "max_tokens": 1})
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(made.client.post("/api/generate", json=body, timeout=200)))
            for _ in range(8)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(200)
        codes = sorted(a.status_code for a in answers)
        assert codes.count(503) >= 1
        assert codes.count(200) >= 3
        assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status_code == 503)
        made.server.dispatcher._accepted["demo"] = 3
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        body = b"1\r\n{\r\n0\r\n\r\n"
        # Nobody reads it; where its length is known, the connection serves on.
        again = b""
        with socket.create_connection(("127.0.0.1", made.port), timeout=60) as kept:
            kept.sendall(f"{head}Content-Length: 2\r\n\r\n{{,".encode() * 2)
            while again.count(b"HTTP/1.1 503") < 2 or not again.endswith(b"}"):
                piece = kept.recv(65536)
                assert piece, again
                again += piece
        assert again.count(b"HTTP/1.1 503") == again.count(b"retry-after: ") == 2
        assert b"connection: close" not in again
        last = made.raw(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + body)
        assert last.lower().count(b"connection: close") == 1
        assert made.client.get("/api/health").status_code == 200
        made.server.dispatcher._accepted["demo"] = 0


def test_a_request_over_its_time_is_ended(tmp_path: Path) -> None:
    with running(Settings(data_dir=tmp_path, timeout=0.05, rates=Rates(requests=0))) as made:
        made.client.post("/api/models/demo")
        answer = made.client.post("/api/generate", json={"prompt": "Once", "max_tokens": 500, "ignore_eos": True})
        assert answer.status_code == 504
        loaded = made.server.dispatcher.models.entry("demo").loaded
        assert loaded is not None
        assert blocks_are_back(loaded.llm)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/api/models/demo", "DELETE, GET, POST"),
        ("/api/models/a/b", "DELETE, GET, POST"),
        ("/v1/completions", "POST"),
        ("/", "GET, HEAD"),
        ("/static/app.css", "GET, HEAD"),
        ("/ws", "GET"),
    ],
)
def test_a_method_that_a_path_does_not_have_is_told_those_that_it_has(live: Live, path: str, allowed: str) -> None:
    answer = live.client.put(path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed


def test_the_page_has_a_head(live: Live) -> None:
    page, head = live.client.get("/"), live.client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert (head.headers["content-length"], head.headers["etag"]) == (str(len(page.content)), page.headers["etag"])
    assert live.raw(b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").endswith(b"\r\n\r\n")


def test_strict_servers_refuse_unknown_fields(tmp_path: Path) -> None:
    with running(Settings(data_dir=tmp_path, strict_api=True, rates=Rates(requests=0))) as made:
        answer = made.client.post("/v1/completions", json={"prompt": "a", "zap": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "zap"


def test_ollamas_client_is_understood(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, ollama=True, chat_template="chatml", rates=Rates(requests=0))
    with running(settings, load) as made:
        client = ollama.Client(host=made.url)
        assert [m.model for m in client.list().models] == ["demo:latest"]
        options = {"num_predict": 6, "temperature": 0, "seed": 1}
        whole = client.generate("demo", "Once upon a time", options=options, raw=True)
        assert whole.done
        assert whole.eval_count == 6
        parts = list(client.generate("demo", "Once upon a time", options=options, raw=True, stream=True))
        assert "".join(p.response for p in parts) == whole.response
        talk = client.chat("demo:latest", messages=[{"role": "user", "content": "Hello"}], options=options)
        assert talk.message.role == "assistant"
        assert len(client.embed("demo", ["a", "b"]).embeddings) == 2
        old = client.embeddings("demo", "a")
        assert list(old.embedding) == pytest.approx(client.embed("demo", "a").embeddings[0])
        with pytest.raises(ollama.ResponseError):
            client.generate("none", "a")
        client._client.close()


def test_ollamas_generate_without_a_model_takes_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").symlink_to(DEMO)
    body = {"prompt": "Once", "stream": False, "raw": True, "options": {"num_predict": 1}}
    settings = Settings(data_dir=tmp_path, models_dir=tmp_path, ollama=True, rates=Rates(requests=0))
    with running(settings) as made:
        answer = made.client.post("/api/generate", json=body)
        assert answer.status_code == 400
        assert "0 of 2 models are loaded" in answer.json()["error"]
        assert made.client.post("/api/generate", json={**body, "model": "small"}).status_code == 200
        assert made.client.post("/api/generate", json=body).json()["model"] == "small"
        made.client.post("/api/models/demo")
        answer = made.client.post("/api/generate", json=body)
        assert answer.status_code == 400
        assert "2 of 2 models are loaded" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Once"}),
        ("/v1/responses", {"input": "Once"}),
        ("/api/stream", {"prompt": "Once"}),
        ("/api/chat", {"model": "demo", "messages": [{"role": "user", "content": "Once"}]}),
    ],
)
def test_a_caller_that_is_gone_before_the_first_word_leaves_nothing_behind(
    path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    """The answer is never begun, and no collection of garbage is waited for."""
    server = build(Settings(data_dir=tmp_path, rates=Rates(requests=0), chat_template="chatml", ollama=True), load)
    dispatcher = server.dispatcher
    came = [{"type": "http.request", "body": json.dumps({**body, "stream": True}).encode(), "more_body": False}]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "http_version": "1.1",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }

    async def receive() -> dict[str, Any]:
        return came.pop() if came else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    async def asked() -> tuple[int, dict[str, int], int]:
        await dispatcher.models.load("demo")
        gc.disable()
        try:
            await server.app(scope, receive, send)
        finally:
            gc.enable()
        loaded = dispatcher.models.entry("demo").loaded
        assert loaded is not None
        left = dispatcher.active, dict(dispatcher._accepted), loaded.users
        await dispatcher.models.close()
        return left

    assert asyncio.run(asked()) == (0, {"demo": 0}, 0)


def test_what_the_engine_does_not_take_costs_its_caller_nothing(tmp_path: Path) -> None:
    def narrow(source: str) -> LLM:
        return quarrel.load(source, backend="cpu", threads=1, max_seqs=1, max_waiting=1)

    rates = Rates(requests=0, prompt_tokens=1000, output_tokens=1000)
    with running(Settings(data_dir=tmp_path, rates=rates), narrow) as made:
        dispatcher, now = made.server.dispatcher, time.monotonic()
        dispatcher.limits.local._clock = lambda: now  # on a busy machine the bucket would be full again meanwhile
        answer = made.client.post("/v1/completions", json={"prompt": ["a", "b", "c"], "max_tokens": 100})
        assert answer.status_code == 503
        (caller,) = dispatcher.limits.local._callers.values()
        assert dispatcher.active == dispatcher._accepted["demo"] == caller.streams == 0
        assert {bucket.level for bucket in caller.buckets.values()} == {1000}
        loaded = dispatcher.models.entry("demo").loaded
        assert loaded is not None
        loaded.llm._loop.run(lambda: None)  # the engine has ended by now what was taken before the third was refused
        answer = made.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 600, "ignore_eos": True})
        assert answer.status_code == 200
        left = caller.buckets["prompt_tokens"].level
        refused = made.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2000})
        assert refused.status_code == 429
        assert caller.buckets["prompt_tokens"].level >= left, "of a request that is refused for its answer, nothing"


def test_the_time_to_come_back_is_the_models_own(tmp_path: Path) -> None:
    """Until one more is admitted, at the pace of the model that is wanted."""

    def narrow(source: str) -> LLM:
        return quarrel.load("demo", backend="cpu", threads=1, max_seqs=1, n_ctx=64)

    settings = Settings(("demo", "hf://other/demo"), data_dir=tmp_path, queue=2, max_seqs=1, rates=Rates(requests=0))
    with running(settings, narrow) as made:
        dispatcher, after = made.server.dispatcher, {}
        for entry, interval in zip(dispatcher.models.entries(), (7.0, 1000.0), strict=True):
            body = {"model": entry.name, "prompt": "a", "max_tokens": 1}
            assert made.client.post("/v1/completions", json=body).status_code == 200
            assert entry.loaded is not None
            entry.loaded.llm.stats().end_interval = interval
        dispatcher._accepted.update({entry.name: 3 for entry in dispatcher.models.entries()})  # both are full
        for entry, interval in zip(dispatcher.models.entries(), (7.0, 1000.0), strict=True):
            refused = made.client.post("/v1/completions", json={**body, "model": entry.name})
            assert refused.status_code == 503
            after[interval] = refused.headers["retry-after"]
        assert after == {7.0: "7", 1000.0: "60"}


def test_embeddings_are_charged_for_what_they_took(tmp_path: Path) -> None:
    """How much that is shows when it is done: nothing is thrown away then, and the next one waits."""
    with running(Settings(data_dir=tmp_path, rates=Rates(requests=0, prompt_tokens=100))) as made:
        body = {"input": " ".join(["word"] * 60)}
        answers = [made.client.post("/v1/embeddings", json=body) for _ in range(3)]
        assert [a.status_code for a in answers] == [200, 200, 429]
        used = answers[0].json()["usage"]["prompt_tokens"]
        (caller,) = made.server.dispatcher.limits.local._callers.values()
        assert 50 < used < 100
        assert caller.buckets["prompt_tokens"].level < 0
