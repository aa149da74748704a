"""Images in OpenAI's protocol: the answer is the model's own, and what is no picture is the caller's mistake."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import ollama
import openai
import pytest
from PIL import Image
from websockets.sync.client import connect

import quarrel
from quarrel.server import Settings
from tests.paths import need_cases
from tests.server.conftest import Live, running
from tests.server.test_websocket import hear, say

PIXELS = np.random.default_rng(3).integers(0, 256, (64, 96, 3), np.uint8)


@pytest.fixture(name="seeing", scope="module")
def _seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = need_cases("qwen3vl") / "model-q4_0x.gguf"

    def load(source: str) -> quarrel.LLM:
        return quarrel.load(model, backend="cpu", compute="float32", n_ctx=512)

    settings = Settings(data_dir=tmp_path_factory.mktemp("seeing"), chat_template="chatml")
    with running(settings, load) as live:
        yield live


def question(url: str) -> list[dict[str, object]]:
    image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]


def png() -> str:
    data = io.BytesIO()
    Image.fromarray(PIXELS).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def test_the_official_client_gets_the_models_own_answer(seeing: Live) -> None:
    options = {"max_tokens": 6, "temperature": 0.0}
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        made = client.chat.completions.create(model="demo", messages=question(png()), **options)  # type: ignore[call-overload]
    loaded = seeing.server.dispatcher.models.entry("demo").loaded
    assert loaded is not None
    content = [{"type": "image", "image": PIXELS}, {"type": "text", "text": "What is it?"}]
    own = loaded.llm.chat([{"role": "user", "content": content}], template="chatml", **options)  # type: ignore[attr-defined]
    assert made.choices[0].message.content == own.text
    assert made.usage.prompt_tokens == own.usage.prompt_tokens > 64
    large = png().replace("data:image/png;base64,", "DATA:image/png;BASE64,")
    again = seeing.client.post("/v1/chat/completions", json={"model": "demo", "messages": question(large), **options})
    assert again.json()["choices"][0]["message"]["content"] == own.text


def test_ollamas_client_gets_it_too(seeing: Live) -> None:
    client, data = ollama.Client(seeing.url), base64.b64decode(png().partition(",")[2])
    options = {"num_predict": 6, "temperature": 0.0}
    made = client.chat("demo", [{"role": "user", "content": "What is it?", "images": [data]}], options=options)
    said = client.generate("demo", "What is it?", images=[data], options=options)
    assert client.show("demo").capabilities == ["completion", "vision"]
    client._client.close()
    loaded = seeing.server.dispatcher.models.entry("demo").loaded
    assert loaded is not None
    content = [{"type": "image", "image": PIXELS}, {"type": "text", "text": "What is it?"}]
    turns = [{"role": "user", "content": content}]
    own = loaded.llm.chat(turns, template="chatml", max_tokens=6, temperature=0.0)  # type: ignore[attr-defined]
    assert made.message.content == said.response == own.text
    assert made.prompt_eval_count == own.usage.prompt_tokens
    for images, sentence in (([7], "base64"), (["x"], "image"), ([base64.b64encode(b"GIF8").decode()], "picture|image")):
        bad = {"model": "demo", "messages": [{"role": "user", "content": "a", "images": images}], "stream": False}
        answer = seeing.client.post("/api/chat", json=bad)
        assert answer.status_code == 400
        assert re.search(sentence, answer.json()["error"])
    assert seeing.client.get("/api/tags").json()["models"][0]["capabilities"] == ["completion", "vision"]
    raw = seeing.client.post("/api/generate", json={"model": "demo", "prompt": "a", "raw": True, "images": ["x"]})
    assert "raw prompts take no images" in raw.json()["error"]
    picture = png().partition(",")[2]
    late = seeing.client.post("/api/generate", json={"model": "demo", "prompt": "a", "context": [5], "images": [picture]})
    assert (late.status_code, "to /api/chat" in late.json()["error"]) == (400, True), "the model would not see them"


def test_the_page_learns_of_it_and_sends_one_on_its_socket(seeing: Live) -> None:
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        made = client.chat.completions.create(model="demo", messages=question(png()), max_tokens=6, temperature=0.0)  # type: ignore[arg-type]
    assert [m["vision"] for m in seeing.client.get("/api/models").json()["models"]] == [True]
    with connect(f"ws://127.0.0.1:{seeing.port}/ws") as socket:
        hear(socket, "status")
        more = {"max_tokens": 6, "temperature": 0.0, "stream": False}
        say(socket, "inference", prompt="", messages=question(png()), **more)
        row = hear(socket, "inference", 60)
    assert made.usage is not None
    assert (row["token"], row["prompt_tokens"]) == (made.choices[0].message.content, made.usage.prompt_tokens)


def test_what_is_no_picture_is_refused_and_no_file_or_address_is_opened(seeing: Live, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    Image.fromarray(PIXELS).save(secret)
    for url, sentence in (
        ("data:image/png;base64,AAAA", "wanted PNG, JPEG"),
        ("data:image/png;base64,%%%", "no base64"),
        ("data:image/png,abc", "base64"),
        ("data:image/svg+xml;base64," + base64.b64encode(b"<svg></svg>").decode(), "SVG"),
        (str(secret), "not fetched"),
        (f"file://{secret}", "not fetched"),
        ("http://127.0.0.1:9/x.png", "not fetched"),
    ):
        reply = seeing.client.post("/v1/chat/completions", json={"model": "demo", "messages": question(url)})
        assert reply.status_code == 400, reply.text
        assert sentence in reply.json()["error"]["message"]
    for part in (
        {"type": "image", "image": str(secret)},
        {"type": "input_audio", "input_audio": {}},
        {"type": "image_url"},
    ):
        body = {"model": "demo", "messages": [{"role": "user", "content": [part]}]}
        assert seeing.client.post("/v1/chat/completions", json=body).status_code == 400
