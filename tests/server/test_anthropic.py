"""Anthropic's protocol, spoken by Anthropic's own client and by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest

from quarrel.server import Rates, Settings
from quarrel.server.anthropic import with_pings
from quarrel.server.anthropic_bodies import MessagesBody
from tests.server.conftest import Live, load, running

TURNS: Any = [{"role": "user", "content": "Tell me of a king."}]
TOOLS: Any = [{"name": "find", "description": "Looks.", "input_schema": {"type": "object", "properties": {
    "q": {"type": "string"}}, "required": ["q"], "additionalProperties": False}}]  # fmt: skip
GREEDY: Any = {"extra_body": {"temperature": 0}}
BY_URL: Any = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/x.png"}}
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}{{ tools }}"
WROTE = [
    "<think>Hm",
    "m.</think>\n\nLet me ",
    "look.\n<tool_call>",
    '{"name": "find", "arguments": {"q": "\u2028x"}}',
    "</tool_call>",
]


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("a"), rates=Rates(requests=0), chat_template=TEMPLATE)
    with running(settings) as live:
        yield live


@pytest.fixture(name="client")
def _client(made: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=made.url, api_key="none", max_retries=0) as client:
        yield client


def body(**more: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 8, "messages": TURNS, **more}


def test_a_message_and_its_stream_say_the_same(client: anthropic.Anthropic) -> None:
    options: Any = body(**GREEDY, system="Be brief.")
    whole = client.messages.create(**options)
    assert (whole.role, whole.model, whole.stop_reason, whole.usage.output_tokens) == ("assistant", "demo", "max_tokens", 8)
    assert whole.content[0].type == "text"
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text != ""  # type: ignore[union-attr]
    used = final.usage
    assert used.input_tokens + (used.cache_read_input_tokens or 0) == whole.usage.input_tokens + (
        whole.usage.cache_read_input_tokens or 0
    )
    count = client.messages.count_tokens(model="demo", messages=TURNS, system="Be brief.")
    assert count.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0)


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**body(max_tokens=30, **GREEDY)).content[0].text
    made = client.messages.create(**body(max_tokens=30, **GREEDY, stop_sequences=[text[5:9]]))
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", text[5:9])
    assert made.content[0].text == text[: text.index(text[5:9])]  # type: ignore[union-attr]


@pytest.mark.parametrize("thinks", [True, False])
def test_thoughts_text_and_calls_are_blocks(client: anthropic.Anthropic, written: list[str], thinks: bool) -> None:
    written[:] = WROTE
    options: Any = body(tools=TOOLS)
    if thinks:
        options |= {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    kinds = [*(["thinking"] if thinks else []), "text", "tool_use"]
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [b.type for b in message.content] == kinds
        assert (message.content[-1].name, message.content[-1].input) == ("find", {"q": "\u2028x"})  # type: ignore[union-attr]
        assert (message.content[-2].text, message.stop_reason) == ("Let me look.", "tool_use")  # type: ignore[union-attr]
        assert not thinks or (message.content[0].thinking, message.content[0].signature) == ("Hmm.", "unsigned")  # type: ignore[union-attr]
    assert [e.index for e in events if e.type == "content_block_stop"] == list(range(len(kinds)))
    # What it said goes back as it came, with what came of the call.
    back = [*TURNS, {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in whole.content]}]
    answer = {"type": "tool_result", "tool_use_id": whole.content[-1].id, "content": [{"type": "text", "text": "7"}]}  # type: ignore[union-attr]
    back.append(
        {"role": "user", "content": [answer, {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}]}
    )
    raw = client.messages.with_raw_response.create(**{**options, "messages": back})
    assert raw.headers.get("x-quarrel-ignored") is None


def test_the_bytes_of_a_stream(made: Live, written: list[str]) -> None:
    written[:] = WROTE
    raw = made.client.post("/v1/messages", json=body(tools=TOOLS, stream=True)).text
    events = [e.split("\n") for e in raw.split("\n\n") if e]
    assert all(len(e) == 2 and e[0].startswith("event: ") and e[1].startswith("data: ") for e in events)
    rows = [json.loads(e[1][6:]) for e in events]
    assert [e[0][7:] for e in events] == [r["type"] for r in rows]
    assert [r["type"] for r in rows if r["type"] != "content_block_delta"] == [
        *("message_start", "ping", "content_block_start", "content_block_stop", "content_block_start"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert rows[0]["message"]["content"] == []
    partial = [r["delta"]["partial_json"] for r in rows if r.get("delta", {}).get("type") == "input_json_delta"]
    assert json.loads("".join(partial)) == {"q": "\u2028x"}


def test_images_go_to_the_model_in_their_places() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "seen"}, IMAGE]}
    turns = [{"role": "user", "content": [result, {"type": "text", "text": "What?"}, IMAGE]}]
    messages, _ = MessagesBody.model_validate(body(messages=turns)).conversation()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    assert messages[0] == {"role": "tool", "content": "seen", "tool_call_id": "t"}
    assert messages[1] == {"role": "user", "content": [image, {"type": "text", "text": "What?"}, image]}


def test_a_call_can_be_required(client: anthropic.Anthropic) -> None:
    swim = {**TOOLS[0], "name": "swim"}
    for choice, names in (({"type": "any"}, {"find", "swim"}), ({"type": "tool", "name": "swim"}, {"swim"})):
        made = client.messages.create(**body(tools=[*TOOLS, swim], tool_choice=choice, max_tokens=256))
        assert made.content[0].type == "tool_use"
        assert made.content[0].name in names
    none = client.messages.create(**body(tools=TOOLS, tool_choice={"type": "none"}))
    assert none.content[0].type == "text"
    form: Any = {"format": {"type": "json_schema", "schema": {"const": "42"}}}
    assert client.messages.create(**body(output_config=form, max_tokens=20)).content[0].text == '"42"'  # type: ignore[union-attr]


def test_the_beginning_of_an_answer_is_gone_on_from(made: Live) -> None:
    llm = made.server.dispatcher.models.entry("demo").loaded
    assert llm is not None
    counts = []
    for begun in ([], [{"role": "assistant", "content": "Once upon"}]):
        answer = made.client.post("/v1/messages/count_tokens", json={"messages": [*TURNS, *begun]})
        counts.append(answer.json()["input_tokens"])
    assert counts[1] - counts[0] == len(llm.llm.tokenize("Once upon", False))


def test_what_a_coding_agent_sends(made: Live) -> None:
    """Large system blocks with a line of accounts, tens of tools, metadata, betas, fields of tomorrow."""
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f3;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    tools = [{**TOOLS[0], "name": f"t{i}", "cache_control": {"type": "ephemeral"}} for i in range(2)]
    sent = body(
        model="claude-sonnet-9-20300101", system=system, tools=tools, stream=True, metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1024}, context_management={"edits": []}, temperature=1,
    )  # fmt: skip
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "a-2025-01-01,b",
        "x-api-key": "k",
        "x-stainless-lang": "js",
    }
    answer = made.client.post("/v1/messages?beta=true", json=sent, headers=headers)
    assert answer.status_code == 200, answer.text
    assert "event: message_stop" in answer.text
    assert answer.headers["x-quarrel-ignored"] == "context_management"
    assert answer.headers["request-id"].startswith("req-")
    messages, _ = MessagesBody.model_validate(sent).conversation()
    assert messages[0] == {"role": "system", "content": "You are an agent."}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "1 or more"),
        ({"messages": []}, "at least 1"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "or of type url"),
        ({"messages": [{"role": "user", "content": [BY_URL]}]}, "the model was loaded without a projector"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "the model was loaded without a projector"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "I see"}]},
            "cannot follow images",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}]}, "type 'tool_use'"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]}, "'document'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "has no name"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages.0.content.0.type is missing"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "only tools with an input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "without its name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "swim"}}, "not among tools"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"system": 5}, "system is 5"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "prompt is too long: "),
    ],
)
def test_what_is_refused_is_refused_in_anthropics_form(made: Live, more: dict[str, Any], said: str) -> None:
    answer = made.client.post("/v1/messages", json=body(**more))
    row = answer.json()
    assert (answer.status_code, row["type"], row["error"]["type"]) == (400, "error", "invalid_request_error"), answer.text
    assert said in row["error"]["message"]


def test_errors_are_the_clients_own(client: anthropic.Anthropic, made: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'nope'"):
        client.messages.create(**body(model="nope"))
    with pytest.raises(anthropic.BadRequestError, match="or of type url"):
        client.messages.create(**body(messages=[{"role": "user", "content": [{"type": "image"}]}]))
    monkeypatch.setattr(made.server.dispatcher, "settings", Settings(strict_api=True, chat_template=TEMPLATE))
    deep = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
        {"type": "text", "text": "a", "zzz": 1}]}]}]  # fmt: skip
    for more, name in (({"zzz": 1}, "zzz"), ({"messages": deep}, "messages.0.content.0.content.0.zzz")):
        row = made.client.post("/v1/messages", json=body(**more)).json()
        assert row["error"]["message"] == f"not understood here: {name}"


def test_keys_come_in_its_header(tmp_path: Any) -> None:
    with running(Settings(data_dir=tmp_path, api_keys=("k" * 20,), chat_template=TEMPLATE), load) as made:
        with anthropic.Anthropic(base_url=made.url, api_key="k" * 20, max_retries=0) as client:
            assert client.messages.create(**body(max_tokens=1)).content
            assert client.models.list().data[0].id == "demo"
        with anthropic.Anthropic(base_url=made.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError, match="unknown, expired or revoked"):
                client.messages.create(**body())


def test_a_caller_who_waits_hears_that_somebody_is_there() -> None:
    async def slow() -> AsyncIterator[str]:
        yield "a"
        await never.wait()
        yield "b"

    async def hear() -> list[str]:
        found = []
        async for piece in with_pings(slow(), 0.01):
            found.append(piece)
            if len(found) > 2:
                never.set()
        return found

    never = asyncio.Event()
    found = asyncio.run(hear())
    assert (found[0], found[-1]) == ("a", "b")
    assert set(found[1:-1]) == {'event: ping\ndata: {"type": "ping"}\n\n'}
