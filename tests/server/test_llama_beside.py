"""llama-server's own routes in `quarrel serve`, beside the other protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quarrel.server import Keyring, Settings
from tests.server.conftest import Live, running
from tests.server.test_llama import ask


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(name="live", scope="module")
def _live(folder: Path) -> Iterator[Live]:
    settings = Settings(models=("demo", "demo-chat"), data_dir=folder / "none", slot_save_path=folder)
    with running(settings) as live:
        yield live


def test_a_text_a_hole_and_a_template(live: Live) -> None:
    engine = live.client
    made = ask(engine, "/completion", prompt="Once upon a time", n_predict=6, grammar='root ::= " there" [a-z ]+')
    assert made["content"].startswith(" there")
    assert made["timings"]["predicted_n"] == made["tokens_predicted"]
    assert (made["model"], made["stop"]) == ("demo", True)
    other = ask(engine, "/completion", prompt="Once", n_predict=2, model="demo-chat")
    assert other["model"] == "demo-chat"
    text = ask(engine, "/apply-template", messages=[{"role": "user", "content": "hi"}], model="demo-chat")
    assert text["prompt"].endswith("<|im_start|>assistant\n")
    refused = ask(engine, "/infill", 501, input_prefix="a", input_suffix="b")
    assert refused["error"]["type"] == "not_supported_error"
    vectors = ask(engine, "/embedding", content="a king")
    assert len(vectors[0]["embedding"]) == 1
    with engine.stream("POST", "/completion", json={"prompt": "Once", "n_predict": 3, "stream": True}) as stream:
        rows = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line]
    assert [row["stop"] for row in rows] == [*[False] * (len(rows) - 1), True]


def test_a_models_properties_by_name(live: Live) -> None:
    props = live.client.get("/props", params={"model": "demo-chat"}).json()
    assert (props["model_alias"], props["total_slots"]) == ("demo-chat", 8)
    assert "<|im_start|>" in props["chat_template"]
    assert "meta" not in props
    assert live.client.delete("/api/models/demo-chat").status_code == 200
    again = live.client.get("/props", params={"model": "demo-chat"}).json()
    assert again == props | {"is_sleeping": True}
    assert not live.client.get("/api/models/demo-chat").json()["loaded"]
    wrong = live.client.get("/props", params={"model": "none"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")


def test_a_slot_is_saved_and_restored(live: Live, folder: Path) -> None:
    engine = live.client
    ask(engine, "/completion", prompt="Once upon a time there was a fox", n_predict=4, id_slot=2)
    assert engine.get("/slots").json()[2]["n_prompt_tokens"] > 4
    saved = ask(engine, "/slots/2?action=save", filename="fox.bin")
    assert saved["n_written"] == (folder / "fox.bin").stat().st_size
    assert ask(engine, "/slots/5?action=restore", filename="fox.bin")["n_restored"] == saved["n_saved"]
    assert ask(engine, "/slots/5?action=save", 400, filename="../fox.bin")["error"]["message"] == "Invalid filename"


def test_a_slot_of_another_caller_is_not_saved(tmp_path: Path) -> None:
    keys = Keyring(tmp_path)
    (_, first), (_, second) = keys.create("one"), keys.create("two")
    with running(Settings(models=("demo",), data_dir=tmp_path, slot_save_path=tmp_path)) as live:
        body = {"prompt": "A secret", "n_predict": 2, "id_slot": 0}

        def post(key: str, path: str, body: dict[str, object]) -> httpx.Response:
            return live.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

        assert live.client.post("/completion", json=body).json()["error"]["type"] == "authentication_error"
        assert post(first, "/completion", body).status_code == 200
        refused = post(second, "/slots/0?action=save", {"filename": "a.bin"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert post(first, "/slots/0?action=save", {"filename": "a.bin"}).status_code == 200
        # Nor is its file restored, by which a guess of the text could be tried, or written over.
        missing = post(second, "/slots/1?action=restore", {"filename": "a.bin"})
        assert (missing.status_code, "No such file" in missing.json()["error"]["message"]) == (400, True)
        assert post(second, "/completion", {**body, "id_slot": 2}).status_code == 200
        assert post(second, "/slots/2?action=save", {"filename": "a.bin"}).status_code == 200
        assert post(first, "/slots/1?action=restore", {"filename": "a.bin"}).status_code == 200
        assert len(list(tmp_path.glob("key-*/a.bin"))) == 2
        # What its caller computed for itself alone is that caller's all the same.
        assert post(first, "/completion", {**body, "cache_prompt": False, "id_slot": 3}).status_code == 200
        assert post(second, "/slots/3?action=erase", {}).status_code == 403
        assert post(first, "/slots/3?action=save", {"filename": "b.bin"}).status_code == 200


def test_openais_answers_say_what_they_cost(live: Live) -> None:
    body: Any = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "model": "demo"}
    cost = ask(live.client, "/v1/completions", **body)["timings"]
    assert (cost["predicted_n"], cost["cache_n"] + cost["prompt_n"]) == (4, 5)
    chat: Any = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": "demo-chat"}
    assert ask(live.client, "/v1/chat/completions", **chat)["timings"]["predicted_ms"] > 0
    text = live.client.post("/v1/chat/completions", json={**chat, "stream": True}).text
    rows = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]
    assert ["timings" in row for row in rows] == [*[False] * (len(rows) - 1), True]


def test_they_stand_in_the_document(live: Live) -> None:
    paths = live.client.get("/openapi.json").json()["paths"]
    wanted = {"/completion", "/infill", "/apply-template", "/props", "/slots", "/slots/{id_slot}", "/embedding"}
    assert wanted <= set(paths)
    fields = paths["/completion"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert "grammar" in fields
