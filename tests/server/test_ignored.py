"""What a request says is done, refused or reported, never passed over, however deep it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import connect

from quarrel.llm.structured import without_notes
from quarrel.server import Rates, Settings
from tests.server.conftest import Live, running

TURN = {"role": "user", "content": "a"}
NESTED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "stream_options": {"zzz": 1}}, "stream_options.zzz"),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "text", "zzz": 1}}, "response_format.zzz"),
    ("/v1/chat/completions", {"messages": [TURN, {**TURN, "zzz": 1}]}, "messages.1.zzz"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "zzz": 1}]}]},
     "messages.0.content.0.zzz"),
    ("/v1/responses", {"input": [{**TURN, "zzz": 1}]}, "input.0.zzz"),
    ("/v1/responses", {"input": [TURN, {"type": "reasoning", "id": "rs_1", "summary": []}, TURN]}, "input.1.reasoning"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}, TURN]}, "input.0.item_reference"),
    ("/v1/responses", {"input": "a", "parallel_tool_calls": False}, "parallel_tool_calls"),
    ("/v1/chat/completions", {"messages": [{**TURN, "function_call": {"name": "f"}}]}, "messages.0.function_call"),
    ("/v1/chat/completions", {"messages": [TURN], "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation"),
    ("/api/chat", {"model": "demo", "stream": False, "messages": [{**TURN, "zzz": 1}]}, "messages.0.zzz"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "text", "zzz": 1}}}, "text.format.zzz"),
    ("/api/chat", {"model": "demo", "stream": False, "messages": [TURN], "options": {"num_ctx": 99}}, "options.num_ctx"),
    ("/api/generate", {"model": "demo", "stream": False, "prompt": "a", "options": {"zzz": 1}}, "options.zzz"),
]  # fmt: skip


@pytest.fixture(scope="module", name="ollama")
def _ollama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("o"), rates=Rates(requests=0), ollama=True, chat_template="chatml")
    with running(settings) as made:
        yield made


@pytest.mark.parametrize(("route", "body", "name"), NESTED)
def test_a_nested_field_that_is_not_understood_is_reported(
    ollama: Live, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any], name: str
) -> None:
    answer = ollama.client.post(route, json={**body, **({} if route.startswith("/api") else {"max_tokens": 1})})
    assert answer.status_code == 200, answer.text
    assert name in answer.headers["x-quarrel-ignored"]
    monkeypatch.setattr(ollama.server.dispatcher, "settings", Settings(strict_api=True))
    answer = ollama.client.post(route, json=body)
    assert (answer.status_code, name in answer.text) == (400, True)


def test_an_echoed_answer_with_nulls_reports_nothing(live: Live) -> None:
    echoed = {"role": "assistant", "content": "b", "refusal": None, "audio": None, "function_call": None}
    answer = live.client.post("/v1/chat/completions", json={"messages": [TURN, echoed, TURN], "max_tokens": 1})
    assert (answer.status_code, answer.headers.get("x-quarrel-ignored")) == (200, None)


def test_a_refusal_that_comes_back_is_what_the_model_said(live: Live) -> None:
    said: list[dict[str, Any]] = [
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "refusal": "No.", "content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    counts = set()
    for turn in said:
        body = {"messages": [TURN, turn, TURN], "max_tokens": 1}
        counts.add(live.client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])
    parts = [TURN, {"type": "message", "role": "assistant", "content": said[2]["content"]}, TURN]
    answer = live.client.post("/v1/responses", json={"input": parts, "max_output_tokens": 1})
    counts.add(answer.json()["usage"]["input_tokens"])
    assert len(counts) == 1


def test_a_format_that_no_grammar_knows_is_a_note(live: Live) -> None:
    known = {"type": "string", "format": "date"}
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "iso-week"}, "format": known},
              "required": ["a", "format"], "additionalProperties": False}  # fmt: skip
    for more in ({}, {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}):
        body = {"messages": [TURN], "response_format": {"type": "json_object", "schema": schema}, "max_tokens": 1, **more}
        assert live.client.post("/v1/chat/completions", json=body).status_code == 200
    rest = {"enum": [{"format": "x"}], "properties": {"format": known}}
    assert without_notes({**rest, "format": "x", "anyOf": [{"format": "y"}]}) == {**rest, "anyOf": [{}]}


def test_a_schema_that_cannot_be_used_is_named_without_the_grammar_around_it(live: Live) -> None:
    for tools in ([], [{"type": "function", "function": {"name": "f"}}]):
        wanted = {"type": "json_object", "schema": {"type": "zap"}}
        body = {"messages": [TURN], "tools": tools, "response_format": wanted}
        error = live.client.post("/v1/chat/completions", json=body).json()["error"]
        assert error["message"].endswith("structure cannot be used: Invalid type: zap")
        assert error["param"] == "response_format"


def test_a_schema_in_either_place_is_kept_to(live: Live) -> None:
    for wanted in (
        {"type": "json_object", "schema": {"const": "42"}},
        {"type": "json_schema", "schema": {"const": "42"}},
        {"type": "json_schema", "json_schema": {"schema": {"const": "42"}}},
    ):
        body = {"messages": [TURN], "response_format": wanted, "max_tokens": 20}
        answer = live.client.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == '"42"'


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_object", "schema": 42},
        {"type": "json_object", "schema": {"type": "zap"}},
        {"type": "text", "schema": {"const": 1}},
        {"type": "text", "json_schema": {"schema": {"const": 1}}},
        {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"schema": True}},
        {"type": "json_object", "schema": {"minimum": 10**30}},
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused(live: Live, wanted: dict[str, Any]) -> None:
    body = {"messages": [TURN], "response_format": wanted, "max_tokens": 1}
    assert live.client.post("/v1/chat/completions", json=body).status_code == 400


def test_an_image_is_refused(ollama: Live) -> None:
    for route, sentence in (
        ("/api/chat", "does not support multimodal requests"),
        ("/v1/chat/completions", "without a projector"),
    ):
        body = {"model": "demo", "messages": [{**TURN, "images": ["aGk="]}]}
        answer = ollama.client.post(route, json=body)
        assert (answer.status_code, sentence in answer.text) == (400, True)


def test_a_websocket_says_what_it_ignores(live: Live) -> None:
    with connect(f"ws://127.0.0.1:{live.port}/ws") as page:
        page.send(json.dumps({"type": "inference", "payload": {"prompt": "a", "max_tokens": 1, "zap": 1}}))
        while "generating" not in (said := str(page.recv(20))) and "loading" not in said:
            pass
        assert json.loads(said)["payload"]["ignored"] == "zap"


def test_a_grammar_that_fails_shows_no_state_of_its_engine(live: Live) -> None:
    body = {"messages": [TURN], "response_format": {"type": "json_object", "schema": {"$ref": "#"}}}
    answer = live.client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, "no text fits it" in answer.text, "<state>" in answer.text) == (400, True, False)


def test_an_empty_name_is_no_model(live: Live) -> None:
    assert live.client.post("/v1/completions", json={"model": "", "prompt": "a"}).status_code == 404
