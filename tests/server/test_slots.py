"""Slots of llama-server's protocol: a text saved under a number, restored under another or in another process, erased."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import quarrel
from quarrel.engine import Request, Result
from quarrel.llm import LLM
from quarrel.server import Settings
from quarrel.server.errors import Refused
from quarrel.server.llama.slots import computed, file_of
from tests.server.conftest import running
from tests.server.test_llama import TEMPLATE, ask, events


def load(source: str) -> LLM:
    return quarrel.load(source, backend="cpu", threads=2, n_ctx=256, max_seqs=2)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(name="engine", scope="module")
def _engine(folder: Path) -> Iterator[httpx.Client]:
    settings = Settings(data_dir=folder / "none", llama=True, chat_template=TEMPLATE, slot_save_path=folder)
    with running(settings, load) as live:
        yield live.client


FRANCE, GERMANY = "Once upon a time there was a king of France", "Once upon a time there was a king of Germany"
GREEDY: dict[str, Any] = {"n_predict": 8, "temperature": 0, "ignore_eos": True}


def test_a_text_is_saved_and_restored_and_erased(engine: httpx.Client, folder: Path) -> None:
    first = ask(engine, "/completion", prompt=FRANCE, id_slot=1, **GREEDY)
    prompt = first["timings"]["prompt_n"]
    assert (first["id_slot"], first["timings"]["cache_n"]) == (1, 0)
    saved = ask(engine, "/slots/1?action=save", filename="one.bin")
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (1, "one.bin", prompt + 7)
    assert saved["n_written"] == (folder / "one.bin").stat().st_size
    assert saved["timings"]["save_ms"] > 0
    assert engine.get("/slots").json()[1]["n_prompt_tokens"] == prompt + 7
    # Another number, and another process, go on from there.
    assert engine.post("/slots/1?action=erase").json() == {"id_slot": 1, "n_erased": prompt + 7}
    assert ask(engine, "/completion", prompt=FRANCE, id_slot=0, **GREEDY)["timings"]["cache_n"] == 0
    assert engine.post("/slots/0?action=erase").json()["n_erased"] == prompt + 7
    restored = ask(engine, "/slots/0?action=restore", filename="one.bin")
    assert (restored["n_restored"], restored["n_read"]) == (prompt + 7, saved["n_written"])
    again = ask(engine, "/completion", prompt=FRANCE, id_slot=0, **GREEDY)
    assert (again["timings"]["prompt_n"], again["content"]) == (1, first["content"])
    with running(Settings(data_dir=folder / "none", llama=True, slot_save_path=folder), load) as other:
        assert ask(other.client, "/slots/7?action=restore", filename="one.bin")["n_restored"] == prompt + 7
        *_, last = events(other.client, "/completion", prompt=FRANCE, **GREEDY)
        assert (last["id_slot"], last["timings"]["cache_n"]) == (1, prompt - 1)  # 7 is 1 of 2; it finds what it knows
        assert ask(other.client, "/slots/1?action=save", filename="two.bin")["n_saved"] == prompt + 7
    assert (folder / "two.bin").read_bytes() == (folder / "one.bin").read_bytes()
    for id in (0, 1):
        engine.post(f"/slots/{id}?action=erase")


def test_what_another_slot_s_text_begins_with_stays(engine: httpx.Client) -> None:
    for id, prompt in enumerate((FRANCE, GERMANY)):
        ask(engine, "/completion", prompt=prompt, id_slot=id, **GREEDY)
    engine.post("/slots/0?action=erase")
    known = [ask(engine, "/completion", prompt=p, id_slot=1, **GREEDY)["timings"]["prompt_n"] for p in (GERMANY, FRANCE)]
    assert known[0] == 1
    assert 1 < known[1] < 8
    for id in (0, 1):
        engine.post(f"/slots/{id}?action=erase")


def test_chats_have_slots_too(engine: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Tell me of the king."}]
    for stream in (False, True):
        body = {"messages": messages, "id_slot": 1, "max_tokens": 4, "temperature": 0}
        (events if stream else ask)(engine, "/v1/chat/completions", **body)
        count = ask(engine, "/slots/1?action=save", filename="chat")["n_saved"]
        assert engine.post("/slots/1?action=erase").json()["n_erased"] == count > 10
    refused = ask(engine, "/slots/1?action=save", status=400, filename="chat")
    assert refused["error"]["message"].startswith("Unable to save slot: nothing of this text is in the cache any more")


def test_files_and_names_are_refused_in_a_sentence(engine: httpx.Client, folder: Path) -> None:
    def why(query: str, **body: Any) -> tuple[int, str]:
        answer = engine.post(f"/slots/{query}", json=body)
        return answer.status_code, answer.json()["error"]["message"]

    (folder / "bad").write_bytes(b"GGUF" * 9)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    sentence = "Unable to restore slot: "
    assert why("0?action=restore", filename="none") == (400, f"{sentence}none cannot be read: No such file or directory")
    assert why("0?action=restore", filename="folder") == (400, f"{sentence}folder is no file")
    assert why("0?action=restore", filename="pipe") == (400, f"{sentence}pipe is no file")
    assert why("0?action=restore", filename="bad")[1].startswith(f"{sentence}it is no saved prompt of Quarrel's")
    assert why("0?action=save", filename="folder")[1].startswith("Unable to save slot: ")
    assert why("0?action=restore", filename="../bad") == why("0?action=save", filename="") == (400, "Invalid filename")
    assert why("0?action=save") == (400, "Invalid filename")
    assert why("0?action=move", filename="bad") == why("0", filename="bad") == (400, "Invalid action")
    assert why("a?action=save", filename="bad") == why("-1?action=save", filename="bad") == (400, "Invalid slot ID")
    assert engine.get("/slots?fail_on_no_slot=1").status_code == 200


NAMES = [
    ".",
    "..",
    "a/b",
    "a\\b",
    "C:x",
    "a..b",
    " a",
    "a ",
    "a.",
    "x" * 256,
    "\0",
    "a\x85",
    "a\uff0e",
    "\ud800",
    "a\u2215b",
    "",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_lead_nowhere_else(name: str) -> None:
    with pytest.raises(Refused, match="Invalid filename"):
        file_of(Path("/folder"), name)
    assert file_of(Path("/folder"), "Straße 1.bin") == Path("/folder/Straße 1.bin")


def test_without_a_folder_there_are_no_actions(tmp_path: Path) -> None:
    with running(Settings(data_dir=tmp_path, llama=True), load) as live:
        answer = live.client.post("/slots/0?action=save", json={"filename": "x"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")
        assert [row["is_processing"] for row in live.client.get("/slots").json()] == [False, False]


def test_what_has_run_of_an_answer() -> None:
    with quarrel.load("demo", backend="cpu", n_ctx=64, max_seqs=1) as llm:
        request: Request = llm.prepare("Once", max_tokens=3, temperature=0.0)
        result: Result = llm.start(request).wait()
    tokens = (*request.tokens, *result.token_ids)
    assert computed(request, result) == tokens[:-1]
    assert computed(request, replace(result, stopped_by=7)) == tokens
    assert computed(request, replace(result, token_ids=())) == request.tokens
    assert computed(request, replace(result, shifted=3)) == computed(request, replace(result, finish_reason="error")) == ()
