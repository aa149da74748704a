"""The bundled chat model: its size, its card, the ids of its template, and answers that it must not lose."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import quarrel
from quarrel.cli import main
from quarrel.gguf import resolve
from quarrel.llm import LLM

CARD = (Path(quarrel.__file__).parent / "demo" / "CHAT_MODEL_CARD.md").read_text(encoding="utf-8")
GREEDY = {"temperature": 0.0, "max_tokens": 120}


@pytest.fixture(name="llm", scope="module")
def _llm() -> Iterator[LLM]:
    with quarrel.load("demo-chat", backend="cpu", n_ctx=512) as llm:
        yield llm


def test_its_card_is_about_this_file() -> None:
    (path,) = resolve("demo-chat").paths
    data = path.read_bytes()
    assert len(data) <= 20_000_000
    assert f"`{path.name}`, {len(data):,} bytes" in CARD
    assert hashlib.sha256(data).hexdigest() in CARD


def test_its_template_gives_the_tokens_that_it_was_trained_on(llm: LLM) -> None:
    found = llm.tokenizer.apply_chat([{"role": "user", "content": " Hello! "}])
    begin, end = 3, 4
    assert found[0] == 1
    assert [at for at, token in enumerate(found) if token == begin] == [1, found.index(end) + 2]
    assert found[-1] == found[found.index(end) + 1], "a newline behind each end and each role"
    text = "<s><|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    assert llm.tokenizer.render_chat([{"role": "user", "content": " Hello! "}]) == text


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("How much is 17 + 8?", "17 + 8 = 25."),
        ("What is the capital of France?", "Paris"),
        ("Sort these: 9, 2, 31, 5", "2, 5, 9, 31."),
        ("Tom has a green boat. He lives by the sea. What colour is the boat?", "green"),
        ("Tell me a story about a fox and a lamp.", "lamp"),
        ("Who are you?", "Quarrel"),
    ],
)
def test_it_answers_simple_questions(llm: LLM, words: str, wanted: str) -> None:
    result = llm.chat([{"role": "user", "content": words}], **GREEDY)
    assert wanted in result.text
    assert result.finish_reason == "stop"


def test_it_remembers_what_was_said(llm: LLM) -> None:
    said = [
        {"role": "user", "content": "My name is Clara."},
        {"role": "assistant", "content": "Hello, Clara! Nice to meet you."},
        {"role": "user", "content": "What is my name?"},
    ]
    assert "Clara" in llm.chat(said, **GREEDY).text


def test_chat_takes_it_where_no_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "-p", "How much is 7 + 5?", "--temp", "0", "--backend", "cpu", "-q"]) == 0
    assert "12" in capsys.readouterr().out


def test_its_file_says_how_it_is_sampled(llm: LLM) -> None:
    assert llm.prepare("a").params.temperature == pytest.approx(0.3)
