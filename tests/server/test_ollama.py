"""What Ollama's clients rely on beside its texts: errors, loading and unloading, what a model is, contexts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from quarrel.server import Rates, Settings
from tests.server.conftest import Live, running

FEW = {"num_predict": 4, "temperature": 0, "seed": 1}


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("o"), rates=Rates(requests=0), ollama=True, chat_template="chatml")
    with running(settings) as live:
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
    for answer in (post(made, "chat", messages=5), post(made, "show", model="none"), made.client.delete("/api/tags")):
        assert answer.status_code in (400, 404, 405)
        assert isinstance(answer.json()["error"], str)
    assert isinstance(made.client.get("/api/models/none").json()["error"], dict)  # our own routes have their own form
    with pytest.raises(ollama.ResponseError, match="there is no model 'none' here"):
        client.generate("none", "a")


def test_nothing_to_say_loads_and_keep_alive_0_unloads(made: Live, client: ollama.Client) -> None:
    for route, more in (
        ("generate", {}),
        ("generate", {"prompt": ""}),
        ("chat", {"messages": []}),
        ("generate", {"stream": True}),
    ):
        row = json.loads(post(made, route, keep_alive=0, **more).text)
        assert (row["done"], row["done_reason"], state(made)) == (True, "unload", "unloaded")
        row = json.loads(post(made, route, **more).text)
        assert (row["done"], row["done_reason"], state(made)) == (True, "load", "loaded")
    for keep in (0, "0s", 0.0):
        for stream in (True, False):
            answer = post(made, "generate", prompt="a", options=FEW, keep_alive=keep, stream=stream)
            assert '"done": true' in answer.text.replace('"done":true', '"done": true')
            assert state(made) == "unloaded"
    post(made, "embed", input="a", keep_alive=0)
    assert state(made) == "unloaded"
    assert "x-quarrel-ignored" not in post(made, "generate", prompt="a", options=FEW, keep_alive=-1).headers
    assert post(made, "generate", prompt="a", options=FEW, keep_alive="5m").headers["x-quarrel-ignored"] == "keep_alive"
    for strange in (
        "soon",
        "1" * 4000 + "x",
        "1.1" * 900,
        "5m" * 9,
    ):  # in an instant, however many ways there are to split it
        assert post(made, "generate", prompt="a", keep_alive=strange).status_code == 400


def test_a_model_is_shown_by_either_name(made: Live, client: ollama.Client) -> None:
    info = client.show("demo").modelinfo
    assert info is not None
    assert info["general.architecture"] == "llama"
    assert info["llama.context_length"] == 512
    assert info["tokenizer.ggml.tokens"] is None  # as Ollama leaves it out
    assert made.client.post("/api/show", json={"name": "demo:latest"}).json()["model_info"] == info
    assert made.client.post("/api/show", json={}).status_code == 400


def test_logprobs_have_ollamas_form(made: Live) -> None:
    row = post(made, "generate", prompt="Once upon", raw=True, options=FEW, logprobs=True, top_logprobs=2).json()
    assert len(row["logprobs"]) == 4
    assert "".join(p["token"] for p in row["logprobs"]) == row["response"]
    assert all(len(p["top_logprobs"]) == 2 for p in row["logprobs"])
    lines = post(made, "chat", messages=[{"role": "user", "content": "a"}], options=FEW, logprobs=True, stream=True).text
    assert sum(len(json.loads(line).get("logprobs", [])) for line in lines.splitlines()) == 4
    assert post(made, "generate", prompt="a", top_logprobs=2).status_code == 400


def test_a_context_is_gone_on_with(made: Live) -> None:
    first = post(made, "generate", prompt="Once upon", raw=True, options=FEW).json()
    second = post(made, "generate", prompt=" and", raw=True, options=FEW, context=first["context"]).json()
    assert len(second["context"]) == second["prompt_eval_count"] + second["eval_count"]
    assert second["context"][: len(first["context"])] == first["context"]
    assert 1 not in second["context"][1:]  # one BOS, at the beginning
    assert post(made, "generate", prompt="a", raw=True, options=FEW, context=[]).status_code == 200  # as many begin


def test_what_no_model_here_can_do_is_refused(made: Live) -> None:
    for more in ({"suffix": "b"}, {"images": ["aGk="]}):
        answer = post(made, "generate", prompt="a", **more)
        assert (answer.status_code, next(iter(more)) in answer.json()["error"]) == (400, True)
    assert post(made, "generate", prompt="a", options=FEW, suffix="", images=[]).status_code == 200
    assert post(made, "embed", input="").status_code == 400
    assert post(made, "chat", model="", messages=[{"role": "user", "content": "a"}]).status_code == 404
