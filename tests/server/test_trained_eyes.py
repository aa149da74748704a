"""A small trained model that sees, asked about pictures it has never seen: what it answers is right, by every protocol."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from pathlib import Path

import anthropic
import ollama
import openai
import pytest
import sentencepiece
import torch.nn.functional as F
from PIL import Image
from websockets.sync.client import connect

import quarrel
from quarrel.server import Settings
from tests.server.conftest import Live, running
from tests.server.test_websocket import hear, say
from tests.sight import EYES
from tools.eyes.ask import right
from tools.eyes.export import export
from tools.eyes.model import Seeing, TowerShape
from tools.eyes.pictures import Scene, drawn
from tools.eyes.train import batch, save, tokenizer

MODEL = EYES / "trained" / "model.gguf"
ASKED = "What do you see?"


@pytest.fixture(name="live", scope="module")
def _live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("eyes"))
    with running(settings, lambda source: quarrel.load(MODEL, backend="cpu", n_ctx=256)) as live:
        yield live


def encoded(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def test_answers_about_pictures_that_it_has_never_seen_are_right() -> None:
    with quarrel.load(MODEL, backend="cpu", n_ctx=256) as llm:
        found = right(llm, 16)
    # Of 96 pictures, 384 of 384 answers.
    assert min(found.values()) >= 15, found


def test_every_protocol_and_its_own_client_gets_the_right_answer(live: Live) -> None:
    rng = random.Random("clients")
    scenes = [
        Scene("seven", "red", "white"), Scene("star", "green", "black"), Scene("three", "blue", "grey"),
        Scene("triangle", "purple", "white"), Scene("nine", "orange", "black"),
    ]  # fmt: skip
    one, two, three, four, five = (encoded(drawn(what, rng)) for what in scenes)
    first, second, third, fourth, fifth = (what.answer(ASKED) for what in scenes)
    few = {"max_tokens": 16, "temperature": 0.0}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}}
        messages = [{"role": "user", "content": [url, {"type": "text", "text": ASKED}]}]
        made = client.chat.completions.create(model="demo", messages=messages, **few)  # type: ignore[call-overload]
        assert made.choices[0].message.content == first
        part = {"type": "input_image", "image_url": f"data:image/png;base64,{two}", "detail": "auto"}
        items = [{"role": "user", "content": [part, {"type": "input_text", "text": ASKED}]}]
        said = client.responses.create(model="demo", input=items, temperature=0.0, max_output_tokens=16)  # type: ignore[arg-type]
        assert said.output_text == second
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as claude:
        source = {"type": "base64", "media_type": "image/png", "data": three}
        turn = {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]}
        told = claude.messages.create(model="demo", messages=[turn], max_tokens=16, extra_body={"temperature": 0.0})  # type: ignore[list-item]
        assert told.content[0].text == third
    client = ollama.Client(live.url)
    answer = client.chat(
        "demo", [{"role": "user", "content": ASKED, "images": [four]}], options={"num_predict": 16, "temperature": 0.0}
    )
    client._client.close()
    assert answer.message.content == fourth
    with connect(f"ws://127.0.0.1:{live.port}/ws") as socket:
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{five}"}}
        messages = [{"role": "user", "content": [url, {"type": "text", "text": ASKED}]}]
        say(socket, "inference", prompt="", messages=messages, stream=False, **few)
        assert hear(socket, "inference", 60)["token"] == fifth


def test_two_pictures_and_a_conversation_keep_their_places(live: Live) -> None:
    rng = random.Random("turns")
    turns: list[dict[str, object]] = []
    for colour in ("red", "green"):
        url = f"data:image/png;base64,{encoded(drawn(Scene('circle', colour, 'black'), rng))}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is behind it?"}]
        turns.append({"role": "user", "content": parts})
        body = {"model": "demo", "messages": turns, "max_tokens": 8, "temperature": 0.0}
        reply = live.client.post("/v1/chat/completions", json=body).json()
        turns.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    assert turns[1]["content"] == "Black."
    assert reply["usage"]["prompt_tokens"] > 2 * 16


def test_training_and_exporting_give_such_a_pair_of_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(tokenizer())
    words, model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")), Seeing()
    *inputs, targets = batch(words, TowerShape(), 2, random.Random(1))
    F.cross_entropy(model(*inputs), targets).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    save(model, tmp_path)
    export(tmp_path, tmp_path)
    with quarrel.load(tmp_path / "model.gguf", backend="cpu", n_ctx=128) as llm:
        assert llm._parts.eyes is not None
