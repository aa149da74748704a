"""Thoughts apart from what is said, and texts that go on past their context."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

import quarrel
from quarrel.llm import LLM
from quarrel.llm.thinking import opened_by
from quarrel.server import Settings
from quarrel.server.thoughts import Thoughts
from tests.server.conftest import running
from tests.server.test_llama import ask, events


@pytest.mark.parametrize(
    ("text", "close", "wanted"),
    [
        ("<think>\nWhy?\n</think>\n\nSo.", None, ("Why?", "So.")),
        ("  <think>a</think>b", None, ("a", "b")),
        ("[THINK]a[/THINK]b", None, ("a", "b")),
        ("Why?\n</think>\nSo.", "</think>", ("Why?", "So.")),
        ("<think>never ends", None, ("never ends", "")),
        ("I <think> so</think>.", None, ("", "I <think> so</think>.")),
        ("<thin ice", None, ("", "<thin ice")),
        ("<think></think>ok", None, ("", "ok")),
        ("a < b </ c</think>d", "</think>", ("a < b </ c", "d")),
        ("<", None, ("", "<")),
        ("", None, ("", "")),
        ("a</thin", "</think>", ("a</thin", "")),
    ],
)
def test_thoughts_are_parted_however_the_text_is_cut(text: str, close: str | None, wanted: tuple[str, str]) -> None:
    assert Thoughts(close).push(text, last=True) == wanted
    for size in (1, 2, 3, 5, 7):
        parts = Thoughts(close)
        found = [parts.push(text[i : i + size]) for i in range(0, len(text), size)]
        found.append(parts.push("", last=True))
        assert ("".join(t for t, _ in found), "".join(s for _, s in found)) == wanted, size
    assert Thoughts(close, whole=True).push(text, last=True) == ("", text)


THINKING = "{% for m in messages %}{{ m.content }}{% endfor %} Once <think>\n"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A context of 64 tokens, that shifts."""

    def load(source: str) -> LLM:
        return quarrel.load(source, backend="cpu", threads=2, n_ctx=64, max_seqs=2)

    folder = tmp_path_factory.mktemp("none")
    with running(Settings(data_dir=folder, llama=True, chat_template=THINKING, context_shift=True), load) as live:
        yield live.client


def test_a_thought_that_the_template_begins_is_no_content(small: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "n_predict": 6, "temperature": 0}
    made = ask(small, "/v1/chat/completions", **body)["choices"][0]["message"]
    assert (made["content"], bool(made["reasoning_content"])) == ("", True)
    deltas = [e["choices"][0]["delta"] for e in events(small, "/v1/chat/completions", **body)]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == made["reasoning_content"]
    assert not any(d.get("content") for d in deltas)
    plain = ask(small, "/v1/chat/completions", **body, reasoning_format="none")["choices"][0]["message"]
    assert plain["content"].strip() == made["reasoning_content"].strip()


def test_the_tag_at_the_end_of_a_prompt_is_seen() -> None:
    with quarrel.load("demo", backend="cpu", n_ctx=64) as llm:
        assert opened_by(llm.tokenizer.decode, llm.tokenize("Say it.<think>\n")) == "</think>"
        assert opened_by(llm.tokenizer.decode, llm.tokenize("Say it.<think></think>\n")) is None


def test_a_text_goes_on_past_its_context(small: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "n_predict": 150, "ignore_eos": True, "temperature": 0, "n_keep": 4}
    whole = ask(small, "/completion", **body, return_tokens=True)
    assert (whole["tokens_predicted"], whole["stop_type"], whole["truncated"]) == (150, "limit", True)
    assert (whole["tokens_evaluated"], len(whole["tokens"])) == (5, 150)
    *parts, last = events(small, "/completion", **body)
    assert "".join(p["content"] for p in parts) == whole["content"]
    assert (last["tokens_predicted"], last["timings"]["predicted_n"]) == (150, 150)
    assert [p["tokens_predicted"] for p in parts] == sorted(p["tokens_predicted"] for p in parts)
    # Up to the end of the context it is what it would be without; the rest follows from what was kept of it.
    first = ask(small, "/completion", **{**body, "n_predict": 59}, return_tokens=True)
    assert whole["tokens"][:59] == first["tokens"]
    ids = ask(small, "/tokenize", content="Once upon a time", add_special=True)["tokens"] + first["tokens"]
    kept = ids[:5] + ids[5 + (64 - 5) // 2 :]
    after = ask(small, "/completion", **{**body, "prompt": kept, "n_predict": 10}, return_tokens=True)
    assert whole["tokens"][59:69] == after["tokens"]
    formed = ask(small, "/completion", **{**body, "n_predict": 80, "grammar": "root ::= [a-z ]*"})
    assert (formed["tokens_predicted"], formed["truncated"]) == (80, True)
    assert re.fullmatch("[a-z ]*", formed["content"])
