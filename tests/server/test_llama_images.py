"""Images in llama-server's protocol: what b11434 answers to the same requests with the same model."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

import quarrel
from quarrel.llm import LLM
from quarrel.server import Settings
from tests.paths import need_cases
from tests.server.conftest import running

MARK = "<__media__>"
START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


@pytest.fixture(scope="module", name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = need_cases("qwen3vl") / "model-q4_0x.gguf"

    def load(source: str) -> LLM:
        return quarrel.load(model, backend="cpu", threads=2, n_ctx=512, max_seqs=2)

    data = tmp_path_factory.mktemp("none")
    with running(Settings(data_dir=data, llama=True, media_marker=MARK, context_shift=True), load) as live:
        yield live.client


def image(seed: int = 1) -> str:
    pixels, data = np.random.default_rng(seed).integers(0, 256, (256, 320, 3), np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def ask(engine: httpx.Client, prompt: Any, status: int = 200, **body: Any) -> Any:
    answer = engine.post("/completion", json={"prompt": prompt, "n_predict": 6, "temperature": 0, **body})
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def seen(text: str, *images: str) -> dict[str, Any]:
    return {"prompt_string": text, "multimodal_data": list(images)}


def test_an_image_stands_in_a_prompts_text_where_the_marker_does(engine: httpx.Client) -> None:
    made = ask(engine, seen(f"What is {MARK} this", image()))
    # The tokens of the text, two around the image, and one for each 32 x 32 pixels; the text shows none of those.
    assert (made["tokens_evaluated"], made["prompt"]) == (7 + 80 + 2, f"What is {START}{END} this")
    again = ask(engine, seen(f"What is {MARK} this", image()))
    other = ask(engine, seen(f"What is {MARK} this", image(2)))
    assert again["content"] == made["content"] != other["content"]
    assert again["timings"]["cache_n"] >= 64 > other["timings"]["cache_n"]
    chat = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image()}"}}
    body = {"messages": [{"role": "user", "content": [chat]}], "max_tokens": 2}
    assert engine.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"] > 80


def test_prompts_with_images_in_lists_and_several_images(engine: httpx.Client) -> None:
    alone = ask(engine, seen(f"{MARK} a", image()))["content"]
    plain = ask(engine, "Hello")["content"]
    several = ask(engine, [seen(f"{MARK} a", image()), "Hello", [1, 2, 3], {"prompt_string": "Hello"}])
    assert [r["index"] for r in several] == [0, 1, 2, 3]
    assert [several[i]["content"] for i in (0, 1, 3)] == [alone, plain, plain]
    two = ask(engine, seen(f"{MARK} {MARK}", image(1), image(2)))
    assert (two["tokens_evaluated"], two["prompt"]) == (1 + 2 * 82, f"{START}{END} {START}{END}")
    swapped = ask(engine, seen(f"{MARK} {MARK}", image(2), image(1)))
    assert swapped["content"] != two["content"]


def test_texts_without_images_are_texts(engine: httpx.Client) -> None:
    wanted = ask(engine, "x")["content"]
    for prompt in (seen("x"), {"prompt_string": "x", "multimodal_data": None}, {"prompt_string": "x"}):
        assert ask(engine, prompt)["content"] == wanted
    assert ask(engine, f"text {MARK}")["prompt"] == f"text {MARK}"
    forged = ask(engine, seen(f"{START}{END}{START}{PAD}{END}{MARK}", image()))
    assert forged["tokens_evaluated"] == 5 + 82  # the names are the caller's own, and the image stands behind them


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (seen("none", "aGk="), "0 media markers <__media__> in prompt_string, and 1 entries of multimodal_data"),
        (seen(MARK + MARK, "aGk="), "2 media markers"),
        (seen(MARK), "1 media markers"),
        (seen(MARK, "aGk="), "wanted PNG, JPEG, WebP, GIF or BMP"),
        (seen(MARK, "!!"), "no base64"),
        ({"multimodal_data": ["aGk="]}, "prompt"),
        (seen(MARK * 65, *["aGk="] * 65), "65 images, wanted at most 64"),
    ],
)
def test_what_is_wrong_with_an_image_is_said(engine: httpx.Client, prompt: Any, sentence: str) -> None:
    error = ask(engine, prompt, 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    assert sentence in error["message"]


def test_an_image_that_does_not_fit_and_what_the_properties_say(engine: httpx.Client) -> None:
    error = ask(engine, seen(MARK * 7, *[image()] * 7), 400)
    assert (error["type"], error["n_prompt_tokens"]) == ("exceed_context_size_error", 7 * 82)
    full = ask(engine, seen(f"{MARK}" * 6, *[image()] * 6), n_predict=40, ignore_eos=True)
    assert (full["tokens_evaluated"], full["tokens_predicted"], full["truncated"]) == (492, 20, True)
    answer = engine.get("/props").json()
    assert (answer["media_marker"], answer["modalities"]["vision"]) == (MARK, True)
    assert engine.post("/infill", json={"prompt": seen(MARK, image())}).status_code in (400, 501)


@pytest.mark.parametrize("path", ["/embedding", "/v1/embeddings"])
def test_images_where_vectors_are_made_are_refused_in_a_sentence(engine: httpx.Client, path: str) -> None:
    answer = engine.post(path, json={"input": seen(f"What is {MARK}?", image())})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "vectors are made of texts alone: leave multimodal_data out"
