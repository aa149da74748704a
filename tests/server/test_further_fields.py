"""Fields in other servers' words: limits of thinking, penalties, spaces in JSON, truncation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from quarrel.server import Rates, Settings
from quarrel.server.llama.bodies import ChatBody as LlamaChatBody
from quarrel.server.schemas import ChatBody
from tests.server.conftest import Live, running

THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
TURNS: Any = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(name="thinking", scope="module")
def _thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = Settings(
        data_dir=tmp_path_factory.mktemp("a"), rates=Rates(requests=0), chat_template=THINKS, strict_api=True
    )
    with running(settings) as live:
        yield live


@pytest.mark.parametrize("field", ["thinking_token_budget", "thinking_budget_tokens"])
def test_openais_clients_say_how_long_a_thought_may_be(thinking: Live, field: str) -> None:
    client = openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none")
    options: Any = {"model": "demo", "messages": TURNS, "max_tokens": 30, "temperature": 0}
    free: Any = client.chat.completions.create(**options).choices[0].message
    assert free.content == ""
    made: Any = client.chat.completions.create(**options, extra_body={field: 5})
    assert made.usage.completion_tokens_details.reasoning_tokens in (5, 6)
    message = made.choices[0].message
    assert free.reasoning_content.startswith(message.reasoning_content)
    assert message.content
    none: Any = client.chat.completions.create(**options, extra_body={field: 0}).choices[0].message
    assert not getattr(none, "reasoning_content", None)
    assert none.content


def test_anthropics_budget_is_kept_to(thinking: Live) -> None:
    with anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0) as client:
        options: Any = {"model": "demo", "messages": TURNS, "max_tokens": 30, "extra_body": {"temperature": 0}}
        kinds = [b.type for b in client.messages.create(**options, thinking={"type": "adaptive"}).content]
        assert "text" not in kinds
        made = client.messages.create(**options, thinking={"type": "enabled", "budget_tokens": 5})
        assert [b.type for b in made.content] == ["thinking", "text"]
        with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
            client.messages.create(**options, thinking={"type": "enabled", "budget_tokens": -5})


def test_penalties_have_their_reach_in_each_servers_words() -> None:
    given = {"repeat_penalty": 1.3, "repeat_last_n": 7, "dry_penalty_last_n": 9, "dry_sequence_breakers": ["x"]}
    ours = {"repetition_penalty": 1.3, "penalty_last_n": 7, "dry_last_n": 9, "dry_sequence_breakers": ["x"]}
    for words in (given, ours):
        body = ChatBody.model_validate({"messages": TURNS, **words})
        assert not body.unknown()
        made: Any = body.sampling()
        assert {name: made[name] for name in ours} == ours
        assert not made.keys() & {"repeat_penalty", "repeat_last_n", "dry_penalty_last_n"}
    both = ChatBody.model_validate({"messages": TURNS, "repeat_penalty": 1.3, "repetition_penalty": 1.1}).sampling()
    assert both["repetition_penalty"] == 1.1
    # llama-server's own chat does not leave out what it understands in our words.
    least: Any = LlamaChatBody.model_validate(
        {"messages": TURNS, **ours, "min_tokens": 3, "stop_token_ids": [5]}
    ).sampling()
    assert (least["repetition_penalty"], least["penalty_last_n"], least["dry_last_n"]) == (1.3, 7, 9)
    assert (least["min_tokens"], least["stop_token_ids"]) == (3, [5])


def test_a_penalty_that_looks_at_nothing_changes_nothing(thinking: Live) -> None:
    def text(**more: Any) -> str:
        body = {"prompt": "the cat and the cat and the cat and", "max_tokens": 12, "temperature": 0, **more}
        answer = thinking.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    assert text(repeat_penalty=5.0, repeat_last_n=0) == text() != text(repeat_penalty=5.0, repeat_last_n=64)


@pytest.mark.parametrize(
    "words",
    [
        {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}},
        {"guided_json": '{"type":"array","items":{"type":"integer"},"minItems":3,"maxItems":3}'},
        {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}}},
    ],
)
def test_spaces_in_json_are_as_vllms_clients_want_them(thinking: Live, words: dict[str, Any]) -> None:
    if "structured_outputs" in words:
        words = {"structured_outputs": {**words["structured_outputs"], "whitespace_pattern": "~~"}}
    else:
        words = {**words, "guided_whitespace_pattern": "~~", "guided_decoding_backend": "xgrammar"}
    tokens = thinking.client.post("/api/tokenize", json={"text": "[~", "add_special": False}).json()["tokens"]
    likely = {str(tokens[-1]): 100}
    body = {"prompt": "Numbers: ", "max_tokens": 60, "temperature": 0, "logit_bias": likely, **words}
    text = thinking.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert re.match(r"\[~~[-\d]", text), text


def test_any_object_may_be_wanted(thinking: Live) -> None:
    body = {"prompt": "An object: ", "max_tokens": 3, "structured_outputs": {"json_object": True}}
    assert thinking.client.post("/v1/completions", json=body).json()["choices"][0]["text"].startswith("{")


def test_responses_leave_out_the_oldest_turns_where_truncation_is_auto(thinking: Live) -> None:
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": "the fox ran home " * 60} for i in range(40)]
    body = {"input": [*turns, {"role": "user", "content": "Well?"}], "max_output_tokens": 4}
    assert thinking.client.post("/v1/responses", json=body).status_code == 400
    made = thinking.client.post("/v1/responses", json={**body, "truncation": "auto"})
    assert (made.status_code, made.json()["truncation"]) == (200, "auto"), json.dumps(made.json())[:300]
