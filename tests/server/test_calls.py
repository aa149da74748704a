"""Calls of tools while they come: text flows at once, calls are held back until they are whole, the end stands alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import ollama
import openai
import pytest

from quarrel.server import Rates, Settings
from quarrel.server.calls import CallSplitter, may_be_call, split_calls
from tests.server.conftest import Live, running

TURNS: Any = [{"role": "user", "content": "Tell me of a king."}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    }
]
CALL = '<tool_call>{"name": "find", "arguments": {"q": "x"}}</tool_call>'
TEXTS = ["So, ", "let", " me <b", "> look.", "\n", CALL[:5], CALL[5:30], CALL[30:], "\n", CALL, " Done"]
CHATML = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("c"), rates=Rates(requests=0), chat_template=CHATML)
    with running(settings) as live:
        yield live


@pytest.fixture(name="client")
def _client(made: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_pieces_give_what_the_whole_text_gives() -> None:
    rng = random.Random(0)
    parts = [CALL, "a", " ", "\n", "<tool_call>", "</tool_call>", "<tool", '{"name": "find"}', "[", "{", '"', "<b>",
             "word " * 3, '<tool_call>{"name": "other"}</tool_call>', '{"name": "find", "arguments": {}}']  # fmt: skip
    found = 0
    for _ in range(3000):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 7)))
        whole = split_calls(text, {"find": {}})
        splitter, said, calls = CallSplitter({"find": {}}), "", []
        while text:
            n = rng.randrange(1, 9)
            more, some = splitter.push(text[:n])
            said, calls, text = said + more, calls + some, text[n:]
        more, some = splitter.push("", last=True)
        assert (said + more, calls + some) == whole
        found += len(whole[1])
    assert found > 500


@pytest.mark.parametrize(
    ("begin", "flows"),
    [
        ("Hello", "Hello"),
        ("a < b", "a < b"),
        ("a <tool", "a"),
        ("a <tool_call>{", "a"),
        ("a <tools>", "a <tools>"),
        ('{"na', ""),
        ('{"name": "fi', ""),
        ('{"name": "fo', '{"name": "fo'),
        ('{"age": 5', '{"age": 5'),
        ("[1, 2", "[1, 2"),
        ('[{"arguments"', ""),
    ],
)
def test_only_what_may_become_a_call_is_held_back(begin: str, flows: str) -> None:
    assert CallSplitter({"find": {}}).push(begin)[0] == flows


def test_names_of_any_letters_are_known_in_either_spelling() -> None:
    assert may_be_call('{"name": "f\u00e4', ["f\u00e4n"])
    assert may_be_call('{"name": "f\\u00e4', ["f\u00e4n"])


def test_what_is_no_object_is_no_call() -> None:
    for arguments in ("5", '"text"', "[1]", '"{bad"', "null"):
        text = f'<tool_call>{{"name": "find", "arguments": {arguments}}}</tool_call>'
        assert split_calls(text, {"find": {}}) == (text, [])


def test_a_chat_with_tools_flows_and_ends_alone(client: openai.OpenAI, written: list[str]) -> None:
    written[:] = TEXTS
    chunks = list(client.chat.completions.create(model="demo", messages=TURNS, tools=TOOLS, stream=True))
    deltas = [c.choices[0].delta for c in chunks]
    assert [d.content for d in deltas if d.content] == ["So,", " let", " me <b", "> look.", "\n\n Done"]
    calls = [c for d in deltas for c in d.tool_calls or []]
    assert [(c.index, c.function.name) for c in calls if c.function] == [(0, "find"), (1, "find")]
    assert not any(d.content and d.tool_calls for d in deltas)
    assert all(d.content or d.tool_calls or d.role for d in deltas[:-1]), "no chunk says nothing"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert deltas[-1].model_dump(exclude_none=True) == {}
    with client.chat.completions.stream(
        model="demo", messages=TURNS, tools=TOOLS
    ) as stream:  # the client's own accumulator
        kinds = [event.type for event in stream]
    assert {"content.done", "tool_calls.function.arguments.done"} <= set(kinds)


def test_a_text_and_its_end_have_a_chunk_each_in_every_protocol(made: Live, client: openai.OpenAI) -> None:
    plain = list(client.completions.create(model="demo", prompt="Once", max_tokens=3, temperature=0, stream=True))
    assert [bool(c.choices[0].text) for c in plain] == [True, True, True, False]
    assert [c.choices[0].finish_reason for c in plain] == [None, None, None, "length"]
    chat = list(client.chat.completions.create(model="demo", messages=TURNS, max_tokens=3, logprobs=True, stream=True))
    assert chat[-1].choices[0].delta.model_dump(exclude_none=True) == {}
    assert sum(len(c.choices[0].logprobs.content or []) for c in chat if c.choices[0].logprobs) == 3
    other = ollama.Client(host=made.url)
    for rows in (
        list(other.generate("demo", "Once", stream=True, options={"num_predict": 3})),
        [r.message for r in other.chat("demo", TURNS, stream=True, options={"num_predict": 3})],
    ):
        texts = [r.response if isinstance(r, ollama.GenerateResponse) else r.content for r in rows]
        assert [bool(t) for t in texts][-2:] == [True, False]
    other._client.close()


def test_ollamas_chat_with_tools_flows(made: Live, written: list[str]) -> None:
    written[:] = TEXTS
    client = ollama.Client(host=made.url)
    rows = list(client.chat("demo", TURNS, tools=TOOLS, stream=True))
    assert [r.message.content for r in rows if r.message.content] == ["So,", " let", " me <b", "> look.", "\n\n Done"]
    calls = [c.function for r in rows for c in r.message.tool_calls or []]
    assert [(c.name, dict(c.arguments)) for c in calls] == [("find", {"q": "x"})] * 2
    assert [r.done for r in rows] == [False] * (len(rows) - 1) + [True]
    whole = client.chat("demo", TURNS, tools=TOOLS)
    assert (whole.message.content, len(whole.message.tool_calls or [])) == ("So, let me <b> look.\n\n Done", 2)
    client._client.close()


def test_responses_with_tools_flow_and_say_what_was_asked(client: openai.OpenAI, written: list[str]) -> None:
    written[:] = TEXTS
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    options: Any = {"model": "demo", "input": "a", "tools": tools, "metadata": {"a": "b"}, "temperature": 0.5}
    events = list(client.responses.create(**options, stream=True))
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert deltas == ["So,", " let", " me <b", "> look.", "\n\n Done"]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    done = [e for e in events if e.type == "response.output_item.done"]
    added = [e for e in events if e.type == "response.output_item.added"]
    assert [e.output_index for e in done] == [e.output_index for e in added] == [0, 1, 2, 3]
    final = events[-1].response  # type: ignore[union-attr]
    assert [e.item.model_dump() for e in done] == [item.model_dump() for item in final.output]
    assert [i.type for i in final.output] == ["message", "function_call", "function_call", "message"]
    assert (final.text.format.type, final.truncation, final.metadata) == ("text", "disabled", {"a": "b"})
    assert (final.temperature, final.top_p, final.parallel_tool_calls) == (0.5, 0.95, True)
    assert final.reasoning is not None
    assert final.usage.to_dict()["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    with client.responses.stream(**options) as stream:
        assert stream.get_final_response().output_text == "So, let me <b> look.\n\n Done"
    form: Any = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    assert client.responses.create(model="demo", input="a", text={"format": form}).to_dict()["text"] == {"format": form}


CHOICE = {"type": "object", "properties": {"c": {"enum": ["red"]}}, "required": ["c"], "additionalProperties": False}


def test_tools_and_a_form_of_the_answer_go_together(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": CHOICE}}
    options: Any = {"model": "demo", "messages": TURNS, "tools": TOOLS, "response_format": form, "max_tokens": 256}
    kinds = set()
    for seed in range(12):
        message = client.chat.completions.create(**options, seed=seed, temperature=3, top_p=1).choices[0].message
        kinds.add("call" if message.tool_calls else "form")
        if message.tool_calls:
            assert message.tool_calls[0].function.name == "find"  # type: ignore[union-attr]
        else:
            assert json.loads(message.content or "") == {"c": "red"}
    assert kinds == {"call", "form"}
    made = client.chat.completions.create(**options, tool_choice="required").choices[0]
    assert made.message.tool_calls
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": CHOICE}}
    item = client.responses.create(model="demo", input="a", tools=tools, text=text).output[0]  # type: ignore[call-overload]
    assert item.type in ("message", "function_call")


def test_tools_may_be_narrowed_to_those_that_are_allowed(client: openai.OpenAI, made: Live) -> None:
    tools: Any = [*TOOLS, {"type": "function", "function": {"name": "swim"}}]
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "swim"}}]}}  # fmt: skip
    options: Any = {"model": "demo", "messages": TURNS, "tools": tools, "max_tokens": 256}
    for seed in range(3):
        message = client.chat.completions.create(**options, tool_choice=allowed, seed=seed).choices[0].message
        assert [c.function.name for c in message.tool_calls or []] == ["swim"]  # type: ignore[union-attr]
    allowed["allowed_tools"]["mode"] = "auto"
    assert client.chat.completions.create(**options, tool_choice=allowed, temperature=0).choices[0].message.content
    flat: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "swim"}]}
    flat_tools = [{"type": "function", "name": t["function"]["name"]} for t in tools]
    body = {"input": "a", "tools": flat_tools, "tool_choice": flat}
    answer = made.client.post("/v1/responses", json=body).json()
    assert ([o["name"] for o in answer["output"]], answer["tool_choice"]) == (["swim"], flat)
    for wrong, field in (({"type": "zap"}, "tool_choice.type"), ({"type": "function"}, "tool_choice.function")):
        error = made.client.post("/v1/chat/completions", json={**options, "tool_choice": wrong}).json()["error"]
        assert error["param"] == field
