"""Forty-nine calls of OpenAI's official client, one a test: what its users do with it, and what comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import ResponseTextDeltaEvent

from tests.server.conftest import Live

CHAT: Any = [{"role": "user", "content": "Tell me of a king."}]
DEMO: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 8}
TALK: dict[str, Any] = {**DEMO, "messages": CHAT}
REPLY: dict[str, Any] = {"model": "demo", "input": "Tell me of a king.", "temperature": 0, "max_output_tokens": 8}


class Pick(pydantic.BaseModel):
    """One of two."""

    c: Literal["red", "blue"]


class Person(pydantic.BaseModel):
    """What an answer is to be."""

    kind: Literal["king", "queen"]
    age: Literal[7, 70]


PAINT: Any = {"name": "paint", "parameters": {"type": "object", "properties": {"c": {"enum": ["red"]}}, "required": ["c"],
                                              "additionalProperties": False}}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": PAINT}]
ENOUGH = 256
"""Tokens for each structure here: at most nine gaps of 16 spaces (`quarrel.llm.structured.SPACE`) around 60 characters."""
RUN: Any = {"model": "demo", "messages": CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": ENOUGH}
FLAT: Any = [{"type": "function", **PAINT, "strict": True}]
RED: Any = {"type": "json_schema", "json_schema": {"name": "c", "schema": PAINT["parameters"]}}


def _said(chunks: Any) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def _listens(client: openai.OpenAI) -> bool:
    with client.chat.completions.stream(**{**TALK, "max_tokens": 400}, stop="e") as stream:
        kinds = [event.type for event in stream]
        return kinds[-1] == "content.done" and stream.get_final_completion().choices[0].finish_reason == "stop"


def _replies(client: openai.OpenAI) -> bool:
    with client.responses.stream(model="demo", input="Who?", max_output_tokens=ENOUGH, text_format=Person) as stream:
        text = "".join(e.delta for e in stream if isinstance(e, ResponseTextDeltaEvent))
        return text == stream.get_final_response().output_text != ""


def _calls(client: openai.OpenAI) -> bool:
    (first, *rest) = [
        d for c in client.chat.completions.create(**RUN, stream=True) for d in c.choices[0].delta.tool_calls or ()
    ]
    return json.loads(first.function.arguments + "".join(d.function.arguments for d in rest)) == {"c": "red"}


def _after_a_call(client: openai.OpenAI) -> bool:
    asked = client.chat.completions.create(**RUN).choices[0].message
    assert asked.tool_calls
    turns = [*CHAT, asked, {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "done"}]
    return client.chat.completions.create(**DEMO, messages=turns).choices[0].finish_reason == "length"


def _parsed_call(client: openai.OpenAI) -> bool:
    tool: Any = openai.pydantic_function_tool(Pick)
    made = client.chat.completions.parse(
        model="demo", messages=CHAT, max_tokens=ENOUGH, tools=[tool], tool_choice="required"
    )
    (call,) = made.choices[0].message.tool_calls or ()
    return isinstance(call.function.parsed_arguments, Pick)


def _goes_on(client: openai.OpenAI) -> bool:
    first = client.responses.create(**REPLY)
    return (
        client.responses.create(**{**REPLY, "input": "And?"}, previous_response_id=first.id).previous_response_id
        == first.id
    )


def _is_gone(client: openai.OpenAI) -> bool:
    made = client.responses.create(**REPLY)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    return True


def _stops_reading(client: openai.OpenAI) -> bool:
    with client.chat.completions.create(**{**TALK, "max_tokens": 400}, stream=True) as stream:
        next(iter(stream))
    return bool(client.chat.completions.create(**TALK).choices)


def _together(client: openai.OpenAI) -> bool:
    async def both() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as many:
            return await asyncio.gather(*(many.chat.completions.create(**TALK) for _ in range(4)))

    return len({c.choices[0].message.content for c in asyncio.run(both())}) == 1


def _piecewise(client: openai.OpenAI) -> bool:
    async def read() -> str:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as one:
            return _said([chunk async for chunk in await one.chat.completions.create(**TALK, stream=True)])

    return asyncio.run(read()) == client.chat.completions.create(**TALK).choices[0].message.content


def _lines(client: openai.OpenAI) -> bool:
    with client.chat.completions.with_streaming_response.create(**TALK) as answer:
        return json.loads("".join(answer.iter_lines()))["object"] == "chat.completion"


def _refused(error: type[openai.APIStatusError], call: Callable[[], object]) -> bool:
    with pytest.raises(error) as caught:
        call()
    return bool(caught.value.body) and "Traceback" not in str(caught.value)


CALLS: dict[str, Callable[[openai.OpenAI], object]] = {
    "models.list": lambda c: [m.id for m in c.models.list()] == ["demo"],
    "models.retrieve": lambda c: c.models.retrieve("demo").owned_by,
    "completions": lambda c: c.completions.create(**DEMO, prompt="Once").choices[0].text,
    "completions, stream": lambda c: "".join(
        k.choices[0].text for k in c.completions.create(**DEMO, prompt="Once", stream=True)
    ),
    "completions, prompts and n": lambda c: len(c.completions.create(**DEMO, prompt=["A", "The"], n=2).choices) == 4,
    "completions, token ids": lambda c: c.completions.create(**DEMO, prompt=[1, 5, 6]).usage,
    "completions, lists of ids": lambda c: len(c.completions.create(**DEMO, prompt=[[1, 5, 6], [5]]).choices) == 2,
    "completions, echo and logprobs": lambda c: (
        (
            p := c.completions.create(**{**DEMO, "max_tokens": 0}, prompt="Once upon", echo=True, logprobs=2)
            .choices[0]
            .logprobs
        )
        and p.token_logprobs
    ),
    "completions, seed -1": lambda c: c.completions.create(**DEMO, prompt="Once", seed=-1).choices[0].text,
    "completions, stop": lambda c: (
        c.completions.create(**DEMO, prompt="Once", stop=["e", "a"]).choices[0].finish_reason == "stop"
    ),
    "chat": lambda c: c.chat.completions.create(**TALK).choices[0].message.content,
    "chat, stream": lambda c: _said(c.chat.completions.create(**TALK, stream=True)),
    "chat, stream and usage": lambda c: (
        [*c.chat.completions.create(**TALK, stream=True, stream_options={"include_usage": True})][-1].usage
    ),
    "chat.stream": _listens,
    "chat, developer and names": lambda c: (
        c.chat.completions.create(
            **DEMO,
            messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "name": "ann", "content": "Hi"}],
        ).choices
    ),
    "chat, parts": lambda c: (
        c.chat.completions.create(**DEMO, messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]).id
    ),
    "chat, n": lambda c: len(c.chat.completions.create(**{**TALK, "temperature": 1}, n=3).choices) == 3,
    "chat, logprobs": lambda c: (
        (p := c.chat.completions.create(**TALK, logprobs=True, top_logprobs=3).choices[0].logprobs) and p.content
    ),
    "chat, logit_bias": lambda c: c.chat.completions.create(**TALK, logit_bias={"5": -100}).choices,
    "chat, penalties and user": lambda c: (
        c.chat.completions.create(**TALK, frequency_penalty=1, presence_penalty=1, user="ann").id
    ),
    "chat, max_completion_tokens": lambda c: (
        (u := c.chat.completions.create(model="demo", messages=CHAT, max_completion_tokens=3, temperature=0).usage)
        and u.completion_tokens == 3
    ),
    "chat, reasoning_effort": lambda c: c.chat.completions.create(**TALK, reasoning_effort="low").choices,
    "chat, seed": lambda c: (
        len({c.chat.completions.create(**{**TALK, "temperature": 1}, seed=4).choices[0].message.content for _ in "ab"}) == 1
    ),
    "chat, JSON": lambda c: json.loads(
        c.chat.completions.create(model="demo", messages=CHAT, max_tokens=200, seed=1, response_format=RED)
        .choices[0]
        .message.content
        or ""
    ),
    "chat.parse": lambda c: (
        c.chat.completions.parse(model="demo", messages=CHAT, max_tokens=ENOUGH, response_format=Person)
        .choices[0]
        .message.parsed
    ),
    "chat, tools": lambda c: c.chat.completions.create(**RUN).choices[0].message.tool_calls,
    "chat, tools and stream": _calls,
    "chat, tools and their results": _after_a_call,
    "chat, allowed_tools": lambda c: (
        c.chat.completions.create(
            **{**RUN, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[0]]}}}
        )
        .choices[0]
        .message.tool_calls
    ),
    "chat.parse, tools": _parsed_call,
    "chat, metadata and store": lambda c: c.chat.completions.create(**TALK, metadata={"a": "b"}, store=False).choices,
    "chat, raw headers": lambda c: c.chat.completions.with_raw_response.create(**TALK).headers["x-request-id"],
    "chat, lines": _lines,
    "chat, a reader that goes": _stops_reading,
    "chat, several at once": _together,
    "chat, asynchronous stream": _piecewise,
    "embeddings": lambda c: c.embeddings.create(model="demo", input="a king").data[0].embedding,
    "embeddings, floats": lambda c: (
        c.embeddings.create(model="demo", input=["a", "b"], encoding_format="float").data[1].embedding
    ),
    "embeddings, lists of ids": lambda c: len(c.embeddings.create(model="demo", input=[[5, 6], [7]]).data) == 2,
    "responses": lambda c: c.responses.create(**REPLY).output_text,
    "responses, stream": lambda c: [*c.responses.create(**REPLY, stream=True)][-1].type == "response.incomplete",
    "responses.stream": _replies,
    "responses.parse": lambda c: (
        c.responses.parse(model="demo", input="Who?", text_format=Person, max_output_tokens=ENOUGH).output_parsed
    ),
    "responses, tools": lambda c: (
        c.responses.create(**{**REPLY, "max_output_tokens": ENOUGH}, tools=FLAT, tool_choice="required").output[0].type
        == "function_call"
    ),
    "responses, kept and gone on from": _goes_on,
    "responses.delete": _is_gone,
    "responses.input_tokens": lambda c: c.responses.input_tokens.count(model="demo", input="Who?").input_tokens,
    "moderations": lambda c: _refused(openai.NotFoundError, lambda: c.moderations.create(input="a")),
    "audio.speech": lambda c: _refused(
        openai.NotFoundError, lambda: c.audio.speech.create(model="demo", input="a", voice="a")
    ),
}
ABSENT = {"moderations", "audio.speech"}
"""No model here hears, speaks or judges: these are refused by a sentence."""


@pytest.fixture(name="client", scope="module")
def _client(live: Live) -> Any:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_openais_client(client: openai.OpenAI, call: str) -> None:
    assert CALLS[call](client)


def test_forty_seven_of_forty_nine_are_answered() -> None:
    assert (len(CALLS), len(CALLS.keys() - ABSENT)) == (49, 47)


def test_sound_and_films_are_refused_by_name(live: Live) -> None:
    for path, sentence in (
        ("audio/speech", "no model here hears or speaks"),
        ("audio/transcriptions", "no model here hears or speaks"),
        ("images/generations", "no model here makes images"),
        ("videos", "no model here makes videos"),
    ):
        answer = live.client.post(f"/v1/{path}", json={"model": "demo", "input": "a"})
        assert (answer.status_code, sentence in answer.json()["error"]["message"]) == (404, True), answer.text
    spoken = {"messages": [{"role": "user", "content": "a"}], "modalities": ["text", "audio"], "audio": {"voice": "a"}}
    answer = live.client.post("/v1/chat/completions", json=spoken)
    assert (answer.status_code, "modalities.1" in answer.json()["error"]["message"]) == (400, True), answer.text
    for kind in ("input_audio", "audio_url", "video_url", "input_video"):
        turn = {"role": "user", "content": [{"type": kind, kind: {"url": "data:;base64,AAAA"}}]}
        for path, body in (("chat/completions", {"messages": [turn]}), ("responses", {"input": [turn]})):
            answer = live.client.post(f"/v1/{path}", json=body)
            said = f"a part of type '{kind}': only text and images are understood"
            assert (answer.status_code, said in answer.text) == (400, True), answer.text
