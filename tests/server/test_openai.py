"""OpenAI's protocol, spoken by OpenAI's own client and by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import quarrel
from quarrel.engine import Result, Timings, Usage
from quarrel.server import Rates, Settings
from quarrel.server.errors import Refused
from quarrel.server.openai import _usage
from quarrel.server.response_bodies import ResponsesBody
from quarrel.server.responses import _Answer
from quarrel.server.stored import Responses
from tests.llm.test_embed import with_keys
from tests.paths import need_cases
from tests.server.conftest import Live, running

CHAT = [{"role": "user", "content": "Tell me of a king."}]


@pytest.fixture(name="client")
def _client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo").id == "demo"


def test_a_completion_is_the_models_own_and_repeats_with_its_seed(client: openai.OpenAI, live: Live) -> None:
    made = [client.completions.create(model="demo", prompt="Once upon a time", max_tokens=12, seed=7) for _ in range(2)]
    assert made[0].choices[0].text == made[1].choices[0].text != ""
    assert made[0].choices[0].finish_reason == "length"
    assert (made[0].usage.prompt_tokens, made[0].usage.completion_tokens) == (5, 12)  # type: ignore[union-attr]
    loaded = live.server.dispatcher.models.entry("demo").loaded
    assert loaded is not None
    assert loaded.llm.generate("Once upon a time", max_tokens=12, seed=7).text == made[0].choices[0].text


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": CHAT, "max_tokens": 16, "seed": 3, "temperature": 0.9}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
    assert all(c.usage is None for c in chunks[:-1])


def test_several_continuations_and_prompts_keep_their_places(client: openai.OpenAI) -> None:
    made = client.completions.create(model="demo", prompt=["Once", "The king"], n=2, max_tokens=4, seed=1, echo=True)
    assert [c.index for c in made.choices] == [0, 1, 2, 3]
    assert [c.text.startswith(p) for c, p in zip(made.choices, ["Once", "Once", "The king", "The king"], strict=True)] == [
        True
    ] * 4
    assert made.usage is not None
    assert made.usage.completion_tokens == 16


def test_logprobs_of_both_kinds(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2, temperature=0
    )
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert all(len(t.top_logprobs) == 2 and t.top_logprobs[0].logprob >= t.logprob for t in content)
    old = client.completions.create(model="demo", prompt="A", max_tokens=3, logprobs=1, temperature=0)
    assert len(old.choices[0].logprobs.token_logprobs) == 3  # type: ignore[union-attr, arg-type]


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    text = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=40, temperature=0).choices[0].text
    stop = text[10:14]
    cut = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=40, temperature=0, stop=stop)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_prompt_over_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"the prompt has \d+ tokens and the context holds 512") as caught:
        client.completions.create(model="demo", prompt="word " * 2000)
    assert caught.value.code == "context_length_exceeded"


REFUSALS = [
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "top_p": 1.5}, "top_p"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "max_tokens": -5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "seed": True}, "seed"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": "a\ud800"}, "UTF-8"),
    ({}, "prompt"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
]


@pytest.mark.parametrize(("body", "word"), REFUSALS, ids=[str(b)[:50] for b, _ in REFUSALS])
def test_what_is_out_of_range_is_refused_by_name(live: Live, body: dict[str, Any], word: str) -> None:
    answer = live.client.post("/v1/completions", content=json.dumps({"model": "demo", **body}))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert word in error["message"] or word in (error["param"] or "")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("turn", "status"),
    [
        ({"role": "user"}, 400),
        ({"role": "user", "content": None}, 400),
        ({"role": "user", "content": ""}, 200),
        ({"role": "user", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}, 200),
        ({"role": "assistant"}, 200),
    ],
)
def test_a_message_has_content_or_calls(live: Live, turn: dict[str, Any], status: int) -> None:
    answer = live.client.post("/v1/chat/completions", json={"messages": [turn], "max_tokens": 1})
    assert answer.status_code == status, answer.text
    if status == 400:
        assert (
            answer.json()["error"]["message"] == "a message of role 'user' has no content, wanted a text or parts of text"
        )


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        '{"prompt": "a"}'.encode("utf-16"),
        b'{"prompt": NaN}',
        b"[" * 5000,
        b'{"a":' * 500,
    ],
)
def test_what_is_no_json_object_is_refused(live: Live, raw: bytes) -> None:
    assert live.client.post("/v1/completions", content=raw).status_code == 400


def test_a_list_without_measure_is_refused_unread(live: Live) -> None:
    answer = live.client.post("/v1/embeddings", content=b'{"input":[' + b"1," * 2_500_000 + b"1]}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


def test_an_unknown_field_is_reported_in_a_header(live: Live) -> None:
    answer = live.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "zap": 1, "b\u00e4d": 2})
    assert answer.status_code == 200
    assert answer.headers["x-quarrel-ignored"] == "b?d, zap"
    for name, shown in ((" ", "?"), ("", ""), ("\r\nx: y", "??x:?y"), ("\t", "?"), ("a ", "a?"), ("\u00a0", "?")):
        answer = live.client.post("/api/tokenize", json={"text": "a", name: 1})
        assert (answer.status_code, answer.headers["x-quarrel-ignored"]) == (200, shown)


def test_an_unknown_model_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here, wanted one of demo"):
        client.completions.create(model="gpt-9", prompt="a")


def test_embeddings_as_numbers_as_bytes_and_of_ids_agree(client: openai.OpenAI, live: Live) -> None:
    texts = ["The king slept.", "A ship at sea"]
    numbers = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    packed = client.embeddings.create(model="demo", input=texts)
    assert len(numbers.data) == 2
    assert numbers.data[1].embedding == pytest.approx(packed.data[1].embedding)
    assert numbers.usage.prompt_tokens > 4
    ids = [live.client.post("/api/tokenize", json={"text": t}).json()["tokens"] for t in texts]
    for given in (ids, [texts[0], ids[1]]):  # as LangChain sends them, and mixed
        by_ids = client.embeddings.create(model="demo", input=given, encoding_format="float")  # type: ignore[arg-type]
        for made, wanted in zip(by_ids.data, numbers.data, strict=True):
            assert made.embedding == pytest.approx(wanted.embedding, abs=1e-5)


def test_an_answer_is_held_to_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["king", "queen"]}},
        "required": ["age", "kind"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    made = client.chat.completions.create(model="demo", messages=CHAT, response_format=wanted, max_tokens=200, seed=1)
    found = json.loads(made.choices[0].message.content or "")
    assert 0 <= found["age"] <= 99
    assert found["kind"] in ("king", "queen")
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "zap"}}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="demo", messages=CHAT, response_format=bad)


def test_the_newer_protocol_in_one_piece_and_as_events(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "demo", "input": "Tell me of a king.", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(instructions="Be brief.", **options)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert whole.usage is not None
    assert whole.usage.output_tokens == 12
    chat = client.chat.completions.create(
        model="demo", temperature=0, max_tokens=12, messages=[{"role": "system", "content": "Be brief."}, *CHAT]
    )
    assert whole.output_text == chat.choices[0].message.content
    events = list(client.responses.create(instructions="Be brief.", stream=True, **options))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    talk = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"role": "assistant", "content": "b"}]
    talk += [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]  # type: ignore[list-item]
    talk += [{"type": "function_call_output", "call_id": "c", "output": "d"}]  # type: ignore[list-item]
    assert client.responses.create(model="demo", input=talk, max_output_tokens=2).output_text is not None  # type: ignore[arg-type]
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": {"enum": ["x"]}},
            "required": ["a"], "additionalProperties": False}}  # fmt: skip
    made = client.responses.create(model="demo", input="a", text={"format": form}, max_output_tokens=256)  # type: ignore[call-overload]
    assert json.loads(made.output_text) == {"a": "x"}


def test_the_newer_protocols_calls_and_refusals(live: Live) -> None:
    text = 'So.<tool_call>{"name": "find", "arguments": {"q": "x"}}</tool_call>'
    result = Result(text, (), "stop", Usage(1, 2), Timings(0, 0, 0, 0, 0, 0), 0)
    body = ResponsesBody(input="a", tools=[{"type": "function", "name": "find", "parameters": {}}])
    answer = _Answer(body, body.reading())
    events = [json.loads(e.split("data: ")[1]) for e in [*answer.opening(), *answer.push(text, result)]]
    assert [i["type"] for i in events[-1]["response"]["output"]] == ["message", "function_call"]
    assert events[-1]["response"]["output"][1]["arguments"] == '{"q": "x"}'
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    for wrong in (
        {"input": "a", "previous_response_id": "resp_1"},
        {"input": "a", "previous_response_id": 5},
        {"input": "a", "tools": [{"type": "web_search"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}},
        {"input": []},
    ):
        assert live.client.post("/v1/responses", json=wrong).status_code == 400, wrong


def test_a_response_is_kept_and_gone_on_from(client: openai.OpenAI, live: Live) -> None:
    first = client.responses.create(model="demo", input="Tell me of a king.", max_output_tokens=3, temperature=0)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    (item,) = client.responses.input_items.list(first.id).data
    assert item.content[0].text == "Tell me of a king."  # type: ignore[union-attr]
    second = client.responses.create(model="demo", input="And?", previous_response_id=first.id, max_output_tokens=3)
    said = [{"role": "user", "content": "Tell me of a king."}, *(i.to_dict() for i in first.output)]
    by_hand: Any = [*said, {"role": "user", "content": "And?"}]
    whole = client.responses.create(model="demo", input=by_hand, max_output_tokens=3, store=False)
    assert second.usage.input_tokens == whole.usage.input_tokens  # type: ignore[union-attr]
    assert [i.type for i in client.responses.input_items.list(second.id, order="asc", limit=2).data] == ["message"] * 2
    *_, last = client.responses.create(model="demo", input="a", max_output_tokens=2, temperature=0, stream=True)
    assert client.responses.retrieve(last.response.id).status == "incomplete"  # type: ignore[union-attr]
    client.responses.delete(first.id)
    for gone in (first.id, whole.id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.retrieve(gone)
    error = live.client.post("/v1/responses", json={"input": "a", "previous_response_id": first.id}).json()["error"]
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


def test_images_of_the_newer_protocol_go_to_models_with_eyes(live: Live) -> None:
    parts: Any = [
        {"type": "input_text", "text": "What?"},
        {"type": "input_image", "image_url": "data:image/png;base64,aGk="},
    ]
    (message,) = ResponsesBody.model_validate({"input": [{"role": "user", "content": parts}]}).messages()
    wanted = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
    assert message == {"role": "user", "content": wanted}
    answer = live.client.post("/v1/responses", json={"input": [{"role": "user", "content": parts}]})
    assert (answer.status_code, "without a projector" in answer.text) == (400, True)


def test_responses_are_their_callers_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quarrel.server.stored.MOST", 2)
    monkeypatch.setattr("quarrel.server.stored.MAX_CHARACTERS", 100)
    kept = Responses()
    for n in range(3):
        kept.keep("a", {"id": f"r{n}"}, [])
    kept.keep("a", {"id": "r3", "text": "x" * 200}, [])
    assert kept.find("a", "r2").row == {"id": "r2"}
    for caller, id in (("b", "r2"), ("a", "r0"), ("a", "r3")):
        with pytest.raises(Refused):
            kept.find(caller, id)


@pytest.mark.parametrize(
    "more",
    [
        {"guided_choice": ["42"]},
        {"guided_regex": "42"},
        {"guided_json": {"const": 42}},
        {"guided_json": '{"const": 42}'},
        {"guided_grammar": 'root ::= "42"'},
        {"guided_grammar": 'start: "42"'},
        {"grammar": 'root ::= "4" "2"'},
        {"structured_outputs": {"choice": ["42"]}},
    ],
)
def test_forms_of_the_answer_in_other_servers_words(live: Live, more: dict[str, Any]) -> None:
    for route, body in (("/completions", {"prompt": "a"}), ("/chat/completions", {"messages": CHAT})):
        answer = live.client.post(route, json={**body, **more, "max_tokens": 20}).json()  # without /v1, as they have it
        choice = answer["choices"][0]
        assert (choice.get("text") or choice["message"]["content"]) == "42"
        assert answer["system_fingerprint"].startswith("quarrel-")
    both = {"prompt": "a", **more, "response_format": {"type": "json_object"}}
    assert "several forms" in live.client.post("/v1/completions", json=both).json()["error"]["message"]


def test_what_was_cached_does_not_depend_on_which_continuation_ends_first() -> None:
    results = [Result("", (), "stop", Usage(20, 5, c), Timings(0, 0, 0, 0, 0, 0), 0) for c in (19, 0, 19, 19, 19, 7)]
    assert _usage(results, 3)["prompt_tokens_details"] == {"cached_tokens": 7}
    assert _usage(results[1:2], 1)["prompt_tokens_details"] == {"cached_tokens": 0}


def test_least_tokens_and_tokens_that_stop(live: Live) -> None:
    loaded = live.server.dispatcher.models.entry("demo").loaded
    assert loaded is not None
    body = {"prompt": "Once upon a time", "max_tokens": 9, "temperature": 0}
    whole = live.client.post("/v1/completions", json={**body, "logprobs": 0}).json()["choices"][0]
    id = loaded.llm.tokenize("Once upon a time" + whole["text"], False)[
        len(loaded.llm.tokenize("Once upon a time", False)) + 3
    ]
    counts = []
    for more in ({}, {"min_tokens": 6}):
        answer = live.client.post("/v1/completions", json={**body, "stop_token_ids": [id], **more}).json()
        counts.append(answer["usage"]["completion_tokens"])
    assert counts[0] <= 4
    assert counts[1] >= 6


def test_harnesses_count_tokens_as_they_do_elsewhere(live: Live) -> None:
    def ask(**body: Any) -> Any:
        return live.client.post("/tokenize", json=body).json()

    info = live.client.get("/tokenizer_info").json()
    bare = ask(prompt="Once upon", add_special_tokens=False)
    assert (bare["count"], bare["max_model_len"]) == (len(bare["tokens"]), info["model_max_length"])
    assert ask(content="Once upon")["tokens"] == bare["tokens"]
    assert ask(content="Once upon", add_special=True)["tokens"] == ask(prompt="Once upon")["tokens"]
    assert len(ask(prompt=info["eos_token"], add_special_tokens=False)["tokens"]) == 1
    assert ask(prompt="a king", return_token_strs=True)["token_strs"][-1].endswith("king")
    assert len(ask(messages=CHAT)["tokens"]) > 3
    back = live.client.post("/detokenize", json={"tokens": bare["tokens"]}).json()
    assert back == {"prompt": "Once upon", "content": "Once upon"}
    for wrong in ({}, {"prompt": "a", "content": "a"}):
        assert "wanted one" in ask(**wrong)["error"]["message"]


def test_routes_without_their_prefix(live: Live) -> None:
    for path in ("/models", "/models/demo"):
        assert live.client.get(path).json() == live.client.get("/v1" + path).json()
    bodies = {"/embeddings": {"input": ["a", [5, 6]]}, "/responses": {"input": "a", "max_output_tokens": 1},
              "/messages/count_tokens": {"messages": CHAT}}  # fmt: skip
    for path, body in bodies.items():
        assert live.client.post(path, json=body).status_code == 200, path
    assert live.client.post("/rerank", json={}).json()["error"]["type"] == "invalid_request_error"
    assert live.client.post("/messages", json={}).json()["type"] == "error"


def test_only_a_reranker_ranks(live: Live, tmp_path: Path) -> None:
    body = {"query": "a king", "documents": ["a queen", {"text": "rain"}, "the king"], "return_documents": True}
    refused = live.client.post("/v1/rerank", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_by_model")
    source = need_cases("bert", "model-q4_0x.gguf")
    with quarrel.load(source, backend="cpu", compute="float32") as plain:
        n = plain.spec.n_embd
    head = {"cls.output.weight": np.linspace(-1, 1, n, dtype=np.float32)[None], "cls.output.bias": np.zeros(1, np.float32)}
    path = with_keys(source, tmp_path / "rank.gguf", {"bert.pooling_type": 4}, head)
    with running(Settings(data_dir=tmp_path, models=(str(path),), rates=Rates(requests=0))) as made:
        rows = made.client.post("/v1/rerank", json={**body, "top_n": 2}).json()["results"]
        assert len(rows) == 2
        assert rows[0]["relevance_score"] >= rows[1]["relevance_score"]
        alone = made.client.post("/v1/rerank", json={**body, "documents": [rows[0]["document"]["text"]]}).json()
        texts = {"query": body["query"], "texts": ["a queen", "rain", "the king"]}
        tei = made.client.post("/v1/rerank", json={**texts, "top_n": 2, "return_text": True}).json()
        assert [(r["index"], r["score"]) for r in tei] == [(r["index"], r["relevance_score"]) for r in rows]
        assert [r["text"] for r in tei] == [r["document"]["text"] for r in rows]
        assert made.client.post("/v1/rerank", json={**body, **texts}).status_code == 400
        assert alone["results"][0]["relevance_score"] == pytest.approx(rows[0]["relevance_score"], rel=1e-3, abs=1e-4)


COLOURS = {"type": "object", "properties": {"c": {"$ref": "#/$defs/C"}}, "required": ["c"], "additionalProperties": False,
           "$defs": {"C": {"enum": ["red", "blue"]}}}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "paint", "parameters": COLOURS}},
    {"type": "function", "function": {"name": 'a "rest"'}},
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_required_is_made(client: openai.OpenAI, stream: bool) -> None:
    named: Any = {"type": "function", "function": {"name": "paint"}}
    for choice, names in (("required", {"paint", 'a "rest"'}), (named, {"paint"})):
        options: dict[str, Any] = {"model": "demo", "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "seed": 2}
        if stream:
            chunks = list(client.chat.completions.create(**options, max_tokens=200, stream=True))
            pieces = [d for c in chunks for d in c.choices[0].delta.tool_calls or ()]
            calls, rest = pieces[:1], pieces[1:]
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            assert all((d.index, d.id, d.type, d.function.name) == (0, None, None, None) for d in rest)
            assert len(rest) > 2 or calls[0].function.name != "paint"
            calls[0].function.arguments += "".join(d.function.arguments for d in rest)
        else:
            made = client.chat.completions.create(**options, max_tokens=200).choices[0]
            calls = made.message.tool_calls
            assert (made.finish_reason, made.message.content) == ("tool_calls", None)
        (call,) = calls
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert arguments == {} if call.function.name != "paint" else arguments["c"] in ("red", "blue")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_is_no_text(client: openai.OpenAI, live: Live, stream: bool) -> None:
    named: Any = {"type": "function", "function": {"name": "paint"}}
    for limit in (1, 3, 12, 14):
        options: dict[str, Any] = {"model": "demo", "messages": CHAT, "tools": TOOLS, "tool_choice": named, "seed": 2}
        if stream:
            chunks = list(client.chat.completions.create(**options, max_tokens=limit, stream=True))
            text = "".join(c.choices[0].delta.content or "" for c in chunks)
            calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
            reason = chunks[-1].choices[0].finish_reason
        else:
            made = client.chat.completions.create(**options, max_tokens=limit).choices[0]
            text, calls, reason = made.message.content or "", made.message.tool_calls or [], made.finish_reason
        assert (text, reason) == ("", "length")
        assert [c.function.name for c in calls] == ["paint", *[None] * (len(calls) - 1)][: len(calls)]
    body = {"input": "a", "tools": [{"type": "function", **TOOLS[0]["function"]}], "tool_choice": "required"}
    answer = live.client.post("/v1/responses", json={**body, "max_output_tokens": 3}).json()
    assert (answer["status"], "arguments" in json.dumps([o for o in answer["output"] if o["type"] == "message"])) == (
        "incomplete",
        False,
    )


def test_the_newer_protocol_requires_calls_too(client: openai.OpenAI, live: Live) -> None:
    tools: Any = [{"type": "function", **t["function"]} for t in TOOLS]
    options: dict[str, Any] = {"model": "demo", "input": "A king", "tools": tools, "max_output_tokens": 200}
    named = {"type": "function", "name": "paint"}
    made = client.responses.create(**options, tool_choice=named)
    (call,) = made.output
    assert (call.type, call.name) == ("function_call", "paint")
    assert json.loads(call.arguments)["c"] in ("red", "blue")
    assert made.tool_choice.model_dump() == named
    assert [i.type for i in client.responses.create(**options, tool_choice="required").output] == ["function_call"]
    events = list(client.responses.create(**options, tool_choice=named, stream=True))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (done,) = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert len(pieces) > 2
    assert "".join(pieces) == done == events[-1].response.output[0].arguments  # type: ignore[union-attr]
    assert [e.type for e in events if "output_item" in e.type] == [
        "response.output_item.added",
        "response.output_item.done",
    ]
    other = {"input": "a", "tools": tools, "tool_choice": {"type": "function", "name": "swim"}}
    answer = live.client.post("/v1/responses", json=other)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tools": []}, "not among tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "swim"}}}, "not among tools"),
        ({"tools": [{"function": {"name": "f", "parameters": 5}}]}, "the parameters of 'f' are no object"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "zap"}}}]}, "structure cannot be used"),
        ({"tools": [{"function": 5}]}, "not among tools"),
        ({"tool_choice": "perhaps"}, "wanted 'none', 'auto' or 'required'"),
    ],
)
def test_a_call_that_cannot_be_required_is_refused(live: Live, more: dict[str, Any], said: str) -> None:
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", **more}
    answer = live.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_calls_of_tools_are_taken_out_of_the_text() -> None:
    from quarrel.server.calls import split_calls

    text = 'Let me look.<tool_call>{"name": "find", "arguments": {"q": "x"}}</tool_call>'
    rest, (call,) = split_calls(text, {"find": {}})
    assert (rest, call.name, json.loads(call.arguments)) == ("Let me look.", "find", {"q": "x"})
    assert split_calls('{"name": "find", "parameters": {}}', {"find": {}})[1][0].arguments == "{}"
    for wrong in ("<tool_call>{", '<tool_call>{"name": "other"}</tool_call>', "<tool_call>" * 3, "{}", "[" * 9999):
        assert split_calls(wrong, {"find": {}}) == (wrong, [])


@pytest.mark.parametrize("policy", ["shift", "summary"])
def test_a_conversation_goes_on_past_its_context_and_the_answer_says_so(client: openai.OpenAI, policy: str) -> None:
    turns = [{"role": r, "content": "The king rode out. " * 12} for _ in range(9) for r in ("user", "assistant")]
    options: Any = {"model": "demo", "messages": [*turns, *CHAT], "max_tokens": 8, "temperature": 0}
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(**options)
    options["extra_body"] = {"overflow": policy}
    made = client.chat.completions.create(**options)
    told = made.model_extra["overflow"]  # type: ignore[index]
    assert told["policy"] == policy
    assert 0 < told["dropped"] < len(turns) + 1
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].model_extra["overflow"] == told  # type: ignore[index]
    short: Any = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=2, extra_body={"overflow": policy})
    assert "overflow" not in short.model_extra


def test_an_answer_that_went_on_past_its_context_says_so(client: openai.OpenAI, live: Live) -> None:
    options: Any = {"model": "demo", "prompt": "The king rode out. " * 60, "max_tokens": 260, "temperature": 0}
    shifts: Any = {"overflow": "shift", "ignore_eos": True}
    made = client.completions.create(**options, extra_body=shifts)
    told = made.model_extra["overflow"]  # type: ignore[index]
    assert made.usage.completion_tokens == 260  # type: ignore[union-attr]
    assert (told["dropped"], told["policy"], told["shifted"] > 100) == (0, "shift", True)
    chunks = list(client.completions.create(**options, extra_body=shifts, stream=True))
    assert "overflow" not in chunks[0].model_extra  # type: ignore[operator]
    assert chunks[-1].model_extra["overflow"] == told  # type: ignore[index]
    answer = live.client.post("/api/generate", json={k: v for k, v in {**options, **shifts}.items() if k != "model"})
    assert answer.json()["shifted"] == told["shifted"]


def test_what_the_model_thought_is_no_part_of_a_summary(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    from quarrel.server import overflow

    said, results, summarised = [], overflow.results, overflow.summarised

    async def thinking(*args: Any) -> Any:
        return [replace(r, text="<think>a secret</think>in short") for r in await results(*args)]

    def noted(messages: Any, dropped: int, summary: str) -> Any:
        said.append(summary)
        return summarised(messages, dropped, summary)

    monkeypatch.setattr(overflow, "results", thinking)
    monkeypatch.setattr(overflow, "summarised", noted)
    turns: Any = [{"role": r, "content": "The king rode out. " * 12} for _ in range(9) for r in ("user", "assistant")]
    options: Any = {"max_tokens": 2, "extra_body": {"overflow": "summary"}}
    client.chat.completions.create(model="demo", messages=[*turns, *CHAT], **options)
    assert [s.strip() for s in said] == ["in short"]


def test_a_prompt_is_shortened_where_the_request_says_so(client: openai.OpenAI, live: Live) -> None:
    text = "The king rode out. " * 200
    made = client.completions.create(model="demo", prompt=text, max_tokens=8, extra_body={"overflow": "shift"})
    assert made.usage.prompt_tokens == 504  # type: ignore[union-attr]
    assert made.model_extra["overflow"]["dropped"] > 100  # type: ignore[index]
    answer = live.client.post("/api/generate", json={"prompt": text, "max_tokens": 8, "overflow": "shift"})
    assert answer.json()["dropped"] == made.model_extra["overflow"]["dropped"]  # type: ignore[index]


def test_the_tokens_of_a_response_are_counted_before_it_is_made(client: openai.OpenAI) -> None:
    made = client.responses.create(model="demo", input="Who?", instructions="Short.", max_output_tokens=2)
    counted = client.responses.input_tokens.count(model="demo", input="Who?", instructions="Short.")
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens
    assert client.responses.input_tokens.count(model="demo", input="Who? " * 2000).input_tokens > 512
    again = client.responses.input_tokens.count(model="demo", input="And?", previous_response_id=made.id)
    assert again.input_tokens > counted.input_tokens
