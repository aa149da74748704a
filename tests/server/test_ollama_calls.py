"""Twenty-four calls of Ollama's official client, one a test: what its users do with it, and what comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import ollama
import pytest

from quarrel.server import Rates, Settings
from tests.server.conftest import running
from tests.server.test_rest import DEMO

FEW: Any = {"num_predict": 6, "temperature": 0, "seed": 1}
TALK: Any = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "options": FEW}
TELL: Any = {"model": "demo", "prompt": "Once upon a time", "options": FEW}
COLOUR: Any = {"type": "object", "properties": {"c": {"enum": ["red"]}}, "required": ["c"], "additionalProperties": False}
LONG: Any = {"num_predict": 200, "seed": 1}


TOOLED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools }}"


def _paint(c: str) -> str:
    """Paints.

    Args:
        c: a colour
    """
    return c


def _piecewise(client: ollama.Client) -> bool:
    async def read() -> list[Any]:
        async with ollama.AsyncClient(host=str(client._client.base_url)) as one:
            return [part async for part in await one.chat(**TALK, stream=True)]

    return asyncio.run(read())[-1].done is True


def _copied(client: ollama.Client) -> bool:
    client.copy("demo", "twin")
    return client.delete("twin").status == "success"


def _created(client: ollama.Client) -> bool:
    ended = list(client.create("brief", from_="demo", system="Be brief.", parameters={"temperature": 0}, stream=True))
    made = client.show("brief").parameters
    client.delete("brief")
    return ended[-1].status == "success" and "temperature" in (made or "")


def _sent(client: ollama.Client) -> bool:
    digest = client.create_blob(DEMO)
    client.create("own", files={"own.gguf": digest})
    text = client.generate("own", "Once", options=FEW).response
    client.delete("own")
    return bool(text)


def _refused(word: str, call: Callable[[], object]) -> bool:
    with pytest.raises(ollama.ResponseError, match=word) as caught:
        call()
    return caught.value.status_code in (400, 404)


CALLS: dict[str, Callable[[ollama.Client], object]] = {
    "list": lambda c: [m.model for m in c.list().models] == ["demo:latest"],
    "show": lambda c: (m := c.show("demo")).details and m.modelinfo and m.capabilities,
    "ps": lambda c: c.generate(**TELL) and [m.name for m in c.ps().models] == ["demo:latest"],
    "generate": lambda c: c.generate(**TELL).eval_count == 6,
    "generate, stream": lambda c: list(c.generate(**TELL, stream=True))[-1].done_reason == "length",
    "generate, raw": lambda c: c.generate(**TELL, raw=True).response,
    "generate, system": lambda c: c.generate(**TELL, system="Be brief.").response,
    "generate, context": lambda c: c.generate(**TELL, context=c.generate(**TELL).context).response,
    "generate, a form": lambda c: (
        json.loads(c.generate("demo", "Paint", format=COLOUR, options=LONG).response) == {"c": "red"}
    ),
    "generate, logprobs": lambda c: len(c.generate(**TELL, logprobs=True, top_logprobs=2).logprobs or ()) == 6,
    "generate, load and unload": lambda c: (
        (c.generate("demo").done_reason, c.generate("demo", keep_alive=0).done_reason) == ("load", "unload")
    ),
    "generate, suffix": lambda c: _refused("does not support insert", lambda: c.generate(**TELL, suffix="end")),
    "chat": lambda c: c.chat(**TALK).message.role == "assistant",
    "chat, stream": lambda c: "".join(p.message.content or "" for p in c.chat(**TALK, stream=True)),
    "chat, asynchronous": _piecewise,
    "chat, a form": lambda c: (
        json.loads(c.chat(**{**TALK, "options": LONG}, format=COLOUR).message.content or "") == {"c": "red"}
    ),
    "chat, tools": lambda c: c.chat(**TALK, tools=[_paint]).message,
    "chat, think": lambda c: _refused("does not support thinking", lambda: c.chat(**TALK, think=True)),
    "embed": lambda c: len(c.embed("demo", ["a", "b"]).embeddings) == 2,
    "embeddings": lambda c: c.embeddings("demo", "a").embedding,
    "copy and delete": _copied,
    "create": _created,
    "create_blob": _sent,
    "pull": lambda c: [p.status for p in c.pull("demo", stream=True)][-1] == "success",
}


@pytest.fixture(name="client", scope="module")
def _client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ollama.Client]:
    folder = tmp_path_factory.mktemp("o")
    settings = Settings(data_dir=folder / "data", rates=Rates(requests=0), chat_template=TOOLED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("OLLAMA_MODELS", str(folder / "store"))
        with running(settings) as made, ollama.Client(host=made.url) as client:
            yield client


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_ollamas_client(client: ollama.Client, call: str) -> None:
    assert CALLS[call](client)


def test_there_are_twenty_four() -> None:
    assert len(CALLS) == 24
