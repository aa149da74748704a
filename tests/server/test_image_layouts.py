"""Each family's layout of image tokens through each protocol's own client: the first token is the one that transformers
finds likeliest behind the same prompt and picture, and every protocol counts as many tokens."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import anthropic
import numpy as np
import ollama
import openai
import pytest
from PIL import Image
from websockets.sync.client import connect

import quarrel
from quarrel.llm import images
from quarrel.server import Settings
from tests.paths import need_cases
from tests.server.conftest import running
from tests.server.test_websocket import hear, say
from tests.sight import WHOLE, WHOLES

BEFORE, AFTER = "IJKLM", "STUVWX"
"""The texts around the picture of `tests/eyes/whole`."""
ENLARGED = ("gemma4", "gemma4_e", "gemma3_vl")
"""Their pictures are made as large as they may be, those of the references were not."""


@pytest.mark.parametrize("family", [*WHOLES, "gemma3_vl"])
def test_every_client_gets_the_token_that_the_reference_says(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The vocabulary of this reference has no tokens for the beginning and end of an image.
    monkeypatch.setitem(images.LAYOUTS, "gemma3", replace(images.LAYOUTS["gemma3"], start="", end=""))
    folder = WHOLE / family if family in WHOLES else need_cases(family)
    source = folder if family in WHOLES else folder / "model-q4_0x.gguf"
    pixels, data = np.load(folder / "image.npy"), io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    png = base64.b64encode(data.getvalue()).decode()
    url = f"data:image/png;base64,{png}"
    settings = Settings(data_dir=tmp_path, chat_template="{{ messages[0].content }}")
    with running(settings, lambda name: quarrel.load(source, backend="cpu", n_ctx=512)) as live:
        found = {}
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            part = {"type": "image_url", "image_url": {"url": url}}
            content = [{"type": "text", "text": BEFORE}, part, {"type": "text", "text": AFTER}]
            turns = [{"role": "user", "content": content}]
            chat = client.chat.completions.create(model="demo", messages=turns, max_tokens=1, temperature=0.0)  # type: ignore[arg-type]
            found["chat"] = chat.choices[0].message.content, chat.usage.prompt_tokens  # type: ignore[union-attr]
            texts = [{"type": "input_text", "text": text} for text in (BEFORE, AFTER)]
            parts = [texts[0], {"type": "input_image", "image_url": url, "detail": "auto"}, texts[1]]
            items = [{"role": "user", "content": parts}]
            said = client.responses.create(model="demo", input=items, temperature=0.0, max_output_tokens=1)  # type: ignore[arg-type]
            found["responses"] = said.output_text, said.usage.input_tokens  # type: ignore[union-attr]
        with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as claude:
            image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png}}
            turn = {"role": "user", "content": [content[0], image, content[2]]}
            told = claude.messages.create(model="demo", messages=[turn], max_tokens=1, extra_body={"temperature": 0.0})  # type: ignore[list-item]
            used = told.usage.input_tokens + (told.usage.cache_read_input_tokens or 0)
            found["anthropic"] = told.content[0].text, used  # type: ignore[union-attr]
        with connect(f"ws://127.0.0.1:{live.port}/ws") as socket:
            say(socket, "inference", prompt="", messages=turns, max_tokens=1, temperature=0.0, stream=False)
            row = hear(socket, "inference", 60)
            found["websocket"] = row["token"], row["prompt_tokens"]
        loaded = live.server.dispatcher.models.entry("demo").loaded
        assert loaded is not None
        llm: quarrel.LLM = loaded.llm  # type: ignore[attr-defined]
        own = llm.chat([{"role": "user", "content": [content[0], {"type": "image", "image": pixels}, content[2]]}],
            template=settings.chat_template, max_tokens=1, temperature=0.0)  # fmt: skip
        # Ollama's pictures stand before a message's text.
        turn = {"role": "user", "content": [{"type": "image", "image": pixels}, {"type": "text", "text": BEFORE}]}
        first = llm.chat([turn], template=settings.chat_template, max_tokens=1, temperature=0.0)
        ollamas = ollama.Client(live.url)
        turn = {"role": "user", "content": BEFORE, "images": [png]}
        answer = ollamas.chat("demo", [turn], options={"num_predict": 1, "temperature": 0.0})
        ollamas._client.close()
    assert (answer.message.content, answer.prompt_eval_count) == (first.text, first.usage.prompt_tokens)
    assert found == dict.fromkeys(found, (own.text, own.usage.prompt_tokens))
    if family not in ENLARGED:
        assert own.usage.prompt_tokens == len(np.load(folder / "ids.npy"))
        assert list(own.token_ids) == [np.load(folder / "logits.npy")[-1].argmax()]
