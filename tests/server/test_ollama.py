"""What Ollama's clients rely on beside its texts: errors, loading and unloading, contexts, what a model is able to do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from quarrel.server import Rates, Settings
from tests.llm.test_embed import with_keys
from tests.server.conftest import Live, running
from tests.server.test_rest import DEMO

FEW = {"num_predict": 4, "temperature": 0, "seed": 1}
TURNS = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ABLE = CHAT + "{% if tools %}{{ tools }}{% endif %}{% if enable_thinking %}<think>{% endif %}"


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("o")
    models = ["demo"]
    for name, template in (("plainchat", CHAT), ("ablechat", ABLE)):
        models.append(str(with_keys(DEMO, folder / f"{name}.gguf", {"tokenizer.chat_template": template}, {})))
    with running(Settings(models=tuple(models), data_dir=folder, rates=Rates(requests=0))) as live:
        yield live


@pytest.fixture(name="client")
def _client(made: Live) -> Iterator[ollama.Client]:
    client = ollama.Client(host=made.url)
    yield client
    client._client.close()


def post(made: Live, route: str, **body: Any) -> httpx.Response:
    return made.client.post(f"/api/{route}", json={"model": "demo", "stream": False, **body})


def state(made: Live) -> str:
    return str(made.client.get("/api/models/demo").json()["state"])


def test_an_error_is_a_text(made: Live, client: ollama.Client) -> None:
    for answer in (post(made, "chat", messages=5), post(made, "show", model="none")):
        assert answer.status_code in (400, 404)
        assert isinstance(answer.json()["error"], str)
    for raw in (b"{bad", b"", b"[]", b'{"model": 5}', b"null"):
        answer = made.client.post("/api/chat", content=raw)
        assert (answer.status_code, isinstance(answer.json()["error"], str)) == (400, True)
    assert isinstance(made.client.get("/api/models/none").json()["error"], dict)  # our own routes have their own form
    with pytest.raises(ollama.ResponseError, match="^model 'none' not found") as caught:
        client.generate("none", "a")
    assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("route", "body", "status", "error"),
    [
        ("generate", {"model": "nope", "prompt": "x"}, 404, "model 'nope' not found"),
        ("generate", {"model": "a\ud800", "prompt": "x"}, 404, "model 'a\\ud800' not found"),  # was a 500
        ("chat", {"model": "nope", "messages": TURNS}, 404, "model 'nope' not found"),
        ("chat", {"messages": TURNS}, 400, "model is required"),
        ("embed", {"model": "nope", "input": "x"}, 404, 'model "nope" not found, try pulling it first'),
        ("show", {"name": "nope"}, 404, "model 'nope:latest' not found"),
        ("show", {}, 400, "model is required"),
        ("generate", {"model": "demo", "prompt": "x", "think": True}, 400, '"demo" does not support thinking'),
        ("chat", {"model": "plainchat", "messages": TURNS, "think": "high"}, 400, '"plainchat" does not support thinking'),
        ("chat", {"model": "plainchat", "messages": TURNS, "tools": [TOOL]}, 400,
         "registry.ollama.ai/library/plainchat:latest does not support tools"),
        ("generate", {"model": "demo", "prompt": "x", "suffix": "y"}, 400,
         "registry.ollama.ai/library/demo:latest does not support insert"),
    ],
)  # fmt: skip
def test_its_clients_read_the_words_that_they_know(
    made: Live, route: str, body: dict[str, Any], status: int, error: str
) -> None:
    answer = made.client.post(f"/api/{route}", content=json.dumps(body))
    assert (answer.status_code, answer.json()) == (status, {"error": error})


def test_what_a_model_is_able_to_do_is_not_refused(made: Live, client: ollama.Client) -> None:
    able: dict[str, Any] = {"messages": TURNS, "options": {"num_predict": 1}}
    for more in ({"tools": [TOOL]}, {"think": True}, {"think": "low"}, {"think": False}):
        assert post(made, "chat", **able, model="ablechat", **more).status_code == 200
    assert post(made, "chat", **able, model="plainchat", think=False, tools=[]).status_code == 200
    assert post(made, "generate", prompt="a", options=FEW, suffix="", images=[], template="").status_code == 200
    for name, wanted in (("demo", []), ("plainchat", []), ("ablechat", ["tools", "thinking"])):
        assert client.show(name).capabilities == ["completion", *wanted]


def test_a_path_that_is_none_is_plain_text(made: Live) -> None:
    for method, path, text in (
        ("GET", "/api/nothere", "404 page not found"),
        ("POST", "/api/x/y", "404 page not found"),
        ("GET", "/api/generate", "405 method not allowed"),
        ("PUT", "/api/tags", "405 method not allowed"),
    ):
        answer = made.client.request(method, path)
        assert (answer.text, answer.headers["content-type"].split(";")[0]) == (text, "text/plain")
        assert answer.status_code == int(text[:3])
    assert made.client.get("/v1/nothere").json()["error"]["code"] == "not_found"


def test_the_first_page_is_for_browsers_and_a_word_for_clients(made: Live) -> None:
    for accept, html in (("text/html,application/xhtml+xml,*/*;q=0.8", True), ("*/*", False), ("application/json", False)):
        answer = made.client.get("/", headers={"Accept": accept})
        assert (answer.status_code, "<html" in answer.text) == (200, html)
        assert html or answer.text == "Ollama is running"
        assert answer.headers["vary"] == "Accept"
    assert made.client.head("/").headers["content-type"].startswith("text/plain")


def test_what_can_be_read_has_a_head(made: Live) -> None:
    for path in ("/api/tags", "/api/version", "/api/ps", "/v1/models", "/v1/models/demo", "/healthz", "/metrics"):
        head = made.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert made.client.head("/v1/models/none").status_code == 404
    assert made.client.head("/v1/completions").status_code == 405
    raw = made.raw(
        b"HEAD /api/version HTTP/1.1\r\nHost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 0.5
    )
    assert (raw.count(b"HTTP/1.1 200"), raw.count(b'{"status":"ok"}'), b"0.33" in raw) == (2, 1, False)


def test_nothing_to_say_loads_and_keep_alive_0_unloads(made: Live) -> None:
    for route, more in (
        ("generate", {}),
        ("generate", {"prompt": None, "options": None}),
        ("chat", {"messages": []}),
        ("chat", {"messages": None, "options": None}),
        ("generate", {"stream": True}),
    ):
        answer = post(made, route, keep_alive=0, **more)
        row = answer.json()
        assert answer.headers["content-type"].startswith("application/json")
        assert (row["done"], row["done_reason"], state(made)) == (True, "unload", "unloaded")
        row = post(made, route, **more).json()
        assert (row["done"], row["done_reason"], state(made)) == (True, "load", "loaded")
        assert row.get("response", row.get("message", {}).get("content")) == ""
    for keep in (0, "0s", 0.0):
        for stream in (True, False):
            answer = post(made, "generate", prompt="a", options=FEW, keep_alive=keep, stream=stream)
            assert '"done": true' in answer.text.replace('"done":true', '"done": true')
            assert state(made) == "unloaded"
    post(made, "embed", input="a", keep_alive=0)
    assert state(made) == "unloaded"
    for strange in ("soon", "1" * 4000 + "x", "1.1" * 900, "5m" * 9, True, [5]):
        answer = post(made, "generate", prompt="a", keep_alive=strange)  # in an instant, however long
        assert (answer.status_code, "keep_alive" in answer.json()["error"]) == (400, True)


def until(made: Live) -> float:
    """Seconds that the model will stay."""
    (row,) = [m for m in made.client.get("/api/ps").json()["models"] if m["name"] == "demo:latest"]
    return float(ollama.ProcessResponse.Model(**row).expires_at.timestamp() - time.time())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("keep", "least", "most"), [("5m", 200, 300), (600.5, 500, 601), (-1, 1e9, 1e11), ("-1s", 1e9, 1e11)]
)
def test_a_model_stays_as_long_as_a_request_says(made: Live, keep: object, least: float, most: float) -> None:
    assert post(made, "generate", prompt="a", options=FEW, keep_alive=keep).status_code == 200
    assert least < until(made) <= most
    post(made, "generate", prompt="a", options=FEW)
    assert until(made) > 1e9, "a request that says nothing has no end in mind"


def test_a_model_goes_when_its_time_is_over(made: Live) -> None:
    post(made, "generate", prompt="a", options=FEW, keep_alive=0.05)
    end = time.monotonic() + 30
    while state(made) == "loaded":
        assert time.monotonic() < end
        time.sleep(0.01)
    post(made, "generate", prompt="a", options=FEW, keep_alive="50ms")
    post(made, "generate", prompt="a", options=FEW, keep_alive=-1)
    time.sleep(0.2)
    assert state(made) == "loaded", "the later request has the last word"


def test_logprobs_have_ollamas_form(made: Live) -> None:
    row = post(made, "generate", prompt="Once upon", raw=True, options=FEW, logprobs=True, top_logprobs=2).json()
    assert len(row["logprobs"]) == 4
    assert "".join(p["token"] for p in row["logprobs"]) == row["response"]
    assert b"".join(bytes(p["bytes"]) for p in row["logprobs"]).decode() == row["response"]
    assert all(len(p["top_logprobs"]) == 2 for p in row["logprobs"])
    lines = post(made, "chat", messages=TURNS, options=FEW, logprobs=True, stream=True).text
    assert sum(len(json.loads(line).get("logprobs", [])) for line in lines.splitlines()) == 4
    assert post(made, "generate", prompt="a", top_logprobs=2).status_code == 400


def test_a_context_is_gone_on_with(made: Live) -> None:
    first = post(made, "generate", prompt="Once upon", raw=True, options=FEW).json()
    second = post(made, "generate", prompt=" and", raw=True, options=FEW, context=first["context"]).json()
    assert len(second["context"]) == second["prompt_eval_count"] + second["eval_count"]
    assert second["context"][: len(first["context"])] == first["context"]
    assert 1 not in second["context"][1:]  # one BOS, at the beginning
    assert post(made, "generate", prompt="a", raw=True, options=FEW, context=[]).status_code == 200  # as many begin


def test_options_may_be_what_ollama_begins_with(made: Live) -> None:
    texts = {
        post(made, "generate", prompt="Once", options={**FEW, **more}).json()["response"]
        for more in ({}, {"top_k": -1}, {"typical_p": 0}, {"seed": -1}, {"repeat_penalty": None}, {"num_ctx": 99})
    }
    assert len(texts) == 1
    answer = post(made, "generate", prompt="a", options={**FEW, "num_ctx": 99, "num_keep": 4})
    assert answer.headers["x-quarrel-ignored"] == "options.num_ctx, options.num_keep"
    for wrong in (
        {"repeat_penalty": 0},
        {"seed": "a"},
        {"top_k": -2},
        {"typical_p": -0.1},
    ):  # the first as Ollama refuses it
        assert post(made, "generate", prompt="a", options={**FEW, **wrong}).status_code == 400


def test_a_model_without_a_template_goes_on_with_the_texts_of_a_chat(made: Live, client: ollama.Client) -> None:
    wanted = post(made, "generate", prompt="Once upon a time\n", raw=True, options=FEW).json()
    said = client.chat("demo", [{"role": "user", "content": "Once upon a time"}], options=FEW)
    assert (said.message.content or "").strip() == wanted["response"].strip()
    for route, body in (
        ("/v1/chat/completions", {"messages": TURNS}),
        ("/v1/responses", {"input": "a"}),
        ("/api/stream", {"prompt": "a", "chat": True}),
    ):
        assert made.client.post(route, json=body).status_code == 200


def test_quarrels_own_generate_has_the_same_route(made: Live) -> None:
    for own in ({"prompt": "Once", "max_tokens": 2}, {"prompt": "Once", "model": "demo", "topk": 1}, {"prompt": "Once"}):
        answer = made.client.post("/api/generate", json={"max_tokens": None, **own}).json()
        assert {"text", "tokens_generated"} <= answer.keys()
    refused = made.client.post("/api/generate", json={"prompt": "Once", "max_tokens": -1})
    assert refused.json()["error"]["code"] == "INVALID_REQUEST"
    for theirs in ({"model": "demo", "prompt": "a", "raw": True, "max_tokens": 1}, {"model": "demo", "prompt": "a"}):
        answer = made.client.post("/api/generate", json={**theirs, "stream": False})
        assert "done_reason" in answer.json()


def test_texts_that_are_too_long_for_a_vector_are_cut(made: Live, client: ollama.Client) -> None:
    long = "a ship at sea " * 400
    cut = client.embed("demo", long)
    assert (cut.prompt_eval_count, (cut.total_duration or 0) >= (cut.load_duration or 0)) == (512, True)
    with pytest.raises(ollama.ResponseError, match="the context holds 512"):
        client.embed("demo", long, truncate=False)
    assert list(client.embed("demo", []).embeddings) == []
    assert made.client.post("/api/embed", json={"model": "demo"}).json() == {"model": "demo", "embeddings": []}
    assert made.client.post("/api/embeddings", json={"model": "demo", "prompt": ""}).json() == {"embedding": []}
    assert len(client.embed("demo", "").embeddings[0]) == len(cut.embeddings[0])
    assert len(client.embed("demo", "a", dimensions=8).embeddings[0]) == 8


def test_without_it_nothing_of_it_is_served(tmp_path: Path) -> None:
    with running(Settings(data_dir=tmp_path, ollama=False)) as own:
        assert own.client.get("/api/tags").json()["error"]["code"] == "NOT_FOUND"
        assert "<html" in own.client.get("/").text
        assert own.client.get("/v1/models", headers={"Origin": "http://localhost:1"}).status_code == 403
