"""llama-server's scales of a LoRA adapter: of the server, and of a request."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

import quarrel
from quarrel.launch.arguments import parse
from quarrel.launch.main import settings_of
from quarrel.llm import LLM
from quarrel.server import Settings
from quarrel.server.llama.lora import Lora
from tests.llm.test_adapters import ONE, write_adapter
from tests.server.conftest import running
from tests.server.test_llama import ask
from tests.tiny_model import CHATML, write_tiny_model

GREEDY = {"prompt": "once", "n_predict": 12, "temperature": 0}
TALK = {"messages": [{"role": "user", "content": "once"}], "max_tokens": 12, "temperature": 0}
OFF, ON = [{"id": 0, "scale": 0.0}], [{"id": 0, "scale": 1.0}]


@pytest.fixture(name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("lora")
    base, one = write_tiny_model(folder / "tiny.gguf", template=CHATML), write_adapter(folder / "one.gguf", ONE)

    def load(source: str) -> LLM:
        return quarrel.load(base, backend="cpu", threads=1, adapters={"lora": one})

    settings = Settings(data_dir=folder, llama=True, adapter="lora", adapter_file=str(one))
    with running(settings, load) as live:
        yield live.client


def test_a_scale_holds_for_the_server_or_for_one_request(engine: httpx.Client) -> None:
    (row,) = engine.get("/lora-adapters").json()
    assert (row["id"], row["scale"], row["path"].endswith("one.gguf")) == (0, 1.0, True)
    with_it = ask(engine, "/completion", **GREEDY)["content"]
    without = ask(engine, "/completion", **GREEDY, lora=OFF)["content"]
    assert with_it != without
    assert engine.post("/lora-adapters", json=OFF).json() == {"success": True}
    assert engine.get("/lora-adapters").json()[0]["scale"] == 0.0
    assert ask(engine, "/completion", **GREEDY)["content"] == without
    assert ask(engine, "/completion", **GREEDY, lora=ON)["content"] == with_it
    chats = [ask(engine, "/v1/chat/completions", **TALK, **more) for more in ({}, {"lora": ON}, {"lora": []})]
    texts = [chat["choices"][0]["message"]["content"] for chat in chats]
    assert texts[0] == texts[2] != texts[1]
    engine.post("/lora-adapters", json=ON)
    assert ask(engine, "/completion", **GREEDY)["content"] == with_it


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ([{"id": 0, "scale": 0.5}], "wanted 0 or 1"),
        ([{"id": 1, "scale": 1}], "there is no LoRA adapter 1, this server has 0 alone"),
    ],
)
def test_what_no_adapter_can_have_is_a_sentence(engine: httpx.Client, scales: list[object], said: str) -> None:
    assert said in ask(engine, "/completion", 400, **GREEDY, lora=scales)["error"]["message"]
    answer = engine.post("/lora-adapters", json=scales)
    assert (answer.status_code, said in answer.text) == (400, True)


@pytest.mark.parametrize("body", [b"", b"{", b"{}", b'[{"id": "a"}]', b'[{"id": 0, "scale": "x"}]', b"\xff"])
def test_what_is_no_list_of_scales_is_a_sentence(engine: httpx.Client, body: bytes) -> None:
    answer = engine.post("/lora-adapters", content=body)
    assert (answer.status_code, "no list of scales" in answer.text) == (400, True)


@pytest.fixture(name="bare")
def _bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with running(Settings(data_dir=tmp_path_factory.mktemp("none"), llama=True)) as live:
        yield live.client


def test_without_an_adapter_the_list_is_empty(bare: httpx.Client) -> None:
    assert bare.get("/lora-adapters").json() == []
    answer = bare.post("/lora-adapters", json=ON)
    assert (answer.status_code, "start it with --lora FILE" in answer.text) == (400, True)


@pytest.mark.parametrize(("words", "scale"), [((), 1.0), (("--lora-init-without-apply",), 0.0)])
def test_the_launcher_says_whether_it_is_applied(words: tuple[str, ...], scale: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = settings_of(parse(["--lora", "a.gguf", *words], {}), listener, None, ("a",), 1)
    assert Lora(settings).rows() == [{"id": 0, "path": "a.gguf", "scale": scale, "task_name": "", "prompt_prefix": ""}]
