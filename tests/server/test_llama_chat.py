"""Chats of llama-server's protocol: what templates are told, and answers that a caller begins."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import quarrel
from quarrel.llm import LLM
from quarrel.server import Settings
from quarrel.server.llama.bodies import ChatBody
from quarrel.server.llama.chat import variables
from tests.server.conftest import running
from tests.server.test_llama import ask

TEMPLATE = (
    "{{ enable_thinking }} {{ date_string }} {{ datetime }}|"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{{ ' ' }}{% endif %}"
)
TALK = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": "Once upon"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    def load(source: str) -> LLM:
        return quarrel.load(source, backend="cpu", threads=2, n_ctx=256, max_seqs=1)

    data = tmp_path_factory.mktemp("none")
    chosen: Any = {"thinking": False, "slots": False, "page": False, "verbose": True, "sampling": {"seed": 7}}
    with running(Settings(data_dir=data, llama=True, chat_template=TEMPLATE, **chosen), load) as live:
        yield live.client


def prompt_of(engine: httpx.Client, **body: Any) -> str:
    text: str = ask(engine, "/v1/chat/completions", max_tokens=1, **body)["__verbose"]["prompt"]
    return text.partition("|")[2]


def test_templates_are_told_the_day_and_whether_to_think(engine: httpx.Client) -> None:
    before = time.strftime("%d %b %Y %b %d %Y")
    text = ask(engine, "/apply-template", messages=TALK[:1])["prompt"]
    assert text.partition("|")[0] in (f"False {before}", f"False {time.strftime('%d %b %Y %b %d %Y')}")
    kwargs = {"enable_thinking": True, "date_string": "a day"}
    assert ask(engine, "/apply-template", messages=TALK[:1], chat_template_kwargs=kwargs)["prompt"].startswith(
        "True a day "
    )
    assert ask(engine, "/apply-template", messages=TALK[:1], reasoning_effort="high")["prompt"].startswith("True ")


def test_templates_without_a_word_of_tools_have_them_as_a_text() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    turns: Any = TALK[:1]
    body = ChatBody(messages=turns, tools=tools)
    assert json.loads(variables(Settings(), body)["functions"]) == tools
    assert variables(Settings(), ChatBody(messages=turns))["functions"] == ""


def test_an_answer_goes_on_from_the_assistants_last_words(engine: httpx.Client) -> None:
    wanted = "user: Tell me.\nassistant: Once upon"
    assert prompt_of(engine, messages=TALK) == wanted
    assert prompt_of(engine, messages=TALK, continue_final_message=True, add_generation_prompt=False) == wanted
    parts = [{"type": "text", "text": "Once upon"}]
    assert prompt_of(engine, messages=[TALK[0], {"role": "assistant", "content": parts}]) == wanted
    assert prompt_of(engine, messages=TALK, continue_final_message=False) == f"{wanted}\nassistant: "
    assert ask(engine, "/apply-template", messages=TALK)["prompt"].endswith(wanted)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [*TALK, TALK[1]]}, "2 or more assistant messages"),
        ({"messages": TALK, "continue_final_message": True, "add_generation_prompt": True}, "both true"),
        ({"messages": TALK[:1], "continue_final_message": True}, "wanted a text of the assistant behind others"),
        ({"messages": TALK[1:], "continue_final_message": True}, "the last message is the only one"),
    ],
)
def test_what_cannot_be_gone_on_from_is_said(engine: httpx.Client, body: dict[str, Any], words: str) -> None:
    assert words in ask(engine, "/v1/chat/completions", 400, **body)["error"]["message"]


def test_what_a_chat_was_made_of_is_told_where_it_is_wanted(engine: httpx.Client) -> None:
    told = ask(engine, "/v1/chat/completions", messages=TALK[:1], max_tokens=2)["__verbose"]
    assert (told["tokens_predicted"], told["generation_settings"]["seed"]) == (2, 7)
    assert "__verbose" not in ask(engine, "/v1/chat/completions", messages=TALK[:1], max_tokens=1, verbose=False)


def test_a_chats_tokens_are_counted(engine: httpx.Client) -> None:
    count = ask(engine, "/v1/chat/completions/input_tokens", messages=TALK)["input_tokens"]
    assert count == ask(engine, "/v1/chat/completions", messages=TALK, max_tokens=1)["usage"]["prompt_tokens"]


def test_any_name_means_the_only_model(engine: httpx.Client) -> None:
    assert ask(engine, "/v1/completions", model="davinci-002", prompt="a", max_tokens=1)["model"] == "demo"
    assert ask(engine, "/v1/chat/completions", model="gpt-4", messages=TALK, max_tokens=1)["model"] == "demo"


def test_slots_and_the_page_can_be_left_out(engine: httpx.Client) -> None:
    assert "--slots" in ask_for(engine, "/slots", 501)["error"]["message"]
    assert engine.get("/").status_code == 404
    assert ask_for(engine, "/props", 200)["default_generation_settings"]["params"]["seed"] == 7


def ask_for(engine: httpx.Client, path: str, status: int) -> Any:
    answer = engine.get(path)
    assert answer.status_code == status, answer.text
    return answer.json()
