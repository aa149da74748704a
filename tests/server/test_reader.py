"""What models write, taken apart: thoughts, text and calls of every family, however the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import ollama
import openai
import pytest

import quarrel
from quarrel.server import Rates, Settings
from quarrel.server.conversation import _fitted, _taught, thinking
from quarrel.server.formats import FORMATS, Call, written
from quarrel.server.reader import Reader, Reading
from quarrel.server.schemas import ChatBody
from quarrel.tokenizer.templates import BUILTIN_TEMPLATES
from tests.server.conftest import Live, running

PROPERTIES = {"q": {"type": "string"}, "n": {"type": "integer"}, "deep": {"type": "object"}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("find", "swim.far")
]
ARGUMENTS: list[dict[str, Any]] = [
    {"q": "a\nb \"quoted\" 'x' \u00e9\u2028", "n": 5},
    {},
    {"deep": {"a": [1, {"b": None}], "c": True}, "q": "12"},
]


def read(text: str, size: int | None = None, **more: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """The text in pieces of a size, or of any, or as a whole (None): what was thought, said, called."""
    reader = Reader(Reading(TOOLS), **more)
    rng = random.Random(size)
    pieces = []
    while size is not None and text:
        n = size or rng.randrange(1, 12)
        pieces.append(reader.push(text[:n]))
        text = text[n:]
    pieces.append(reader.push(text, last=True))
    calls = [(c.name, json.loads(c.arguments)) for p in pieces for c in p.calls]
    return "".join(p.thought for p in pieces), "".join(p.text for p in pieces), calls


PIECEMEAL = {"hermes", "function", "mistral", "llama-3", "granite", "deepseek", "kimi", "command-r", "nemotron"}
"""Formats whose arguments are JSON. XML and Python are known at their ends."""


def in_parts(text: str, size: int, **more: Any) -> tuple[str, list[Call], list[list[Any]]]:
    """The text in pieces of this size: what was said, the calls at the end, and the parts, by call."""
    reader = Reader(Reading(TOOLS, **more.pop("reading", {})), in_parts=True, **more)
    cut = [text[i : i + size] for i in range(0, len(text), size)]
    found = [*map(reader.push, cut), reader.push("", last=True)]
    calls = [call for pieces in found for call in pieces.calls]
    parts: list[list[Any]] = [[] for _ in calls]
    for part in (part for pieces in found for part in pieces.parts):
        parts[part.index].append(part)
    assert reader.count == len(calls)
    for call, mine in zip(calls, parts, strict=True):
        assert [p.begins for p in mine] == [True] + [False] * (len(mine) - 1)
        assert not any(p.ends for p in mine[:-1])
        assert {(p.name, p.id) for p in mine} == {(call.name, call.id)}
        assert "".join(p.arguments for p in mine) == call.arguments
    return "".join(p.text for p in found), calls, parts


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_arguments_come_in_pieces_where_they_are_json(name: str, size: int) -> None:
    given = [Call("find", json.dumps(a, ensure_ascii=False)) for a in ARGUMENTS]
    said, calls, parts = in_parts(f"Look:\n{written(name, given)}\n", size)
    assert (said, [(c.name, json.loads(c.arguments)) for c in calls]) == ("Look:", [("find", a) for a in ARGUMENTS])
    assert all(mine[-1].ends for mine in parts)
    if size == 1:
        assert (len(parts[0]) > 20) is (name in PIECEMEAL)
    assert in_parts(written(name, given).replace("find", "lose"), size)[1:] == ([], []), "held back, and then said"


def test_pieces_of_forms_that_models_write() -> None:
    bare = '{"name": "find", "parameters": {"q": "}{\\"\\\\"}}'
    for text, wanted in (
        (bare, [{"q": '}{"\\'}]),
        (f"[{bare}, {bare}]", [{"q": '}{"\\'}] * 2),
        ('{"type": "function", "function": {"name": "find", "arguments": {"n": 1}}}', [{"n": 1}]),
        ('[TOOL_CALLS] find[CALL_ID]abcdefghi[ARGS]{"q": "x"}', [{"q": "x"}]),
        ('<function=find>{"q": "x"}</function>', [{"q": "x"}]),
        ('<tool_call>{"name": "find", "arguments": {"q": "</tool_call>"}}</tool_call>', [{"q": "</tool_call>"}]),
    ):
        said, calls, parts = in_parts(text, 1)
        assert (said, [json.loads(c.arguments) for c in calls]) == ("", wanted), text
        assert all(len(mine) > 4 for mine in parts)
    # Held back to the end: a text of arguments, no arguments at all, and what names none of the functions first.
    late = ['{"name": "find", "arguments": "{}"}', '{"name": "find"}', '{"arguments": {"q": "x"}, "name": "find"}']
    for text in late:
        _, calls, parts = in_parts(f"<tool_call>{text}</tool_call>", 1)
        assert [len(mine) for mine in parts] == [1], text
    assert in_parts('[TOOL_CALLS] find[CALL_ID]abcdefghi[ARGS]{"q": "x"}', 2)[1][0].id == "abcdefghi"


SPOILT = ["{", "{q", "{q:", "{q:}", "{q:1", "{q:1}x", "{q:[1}", "{,}", "{q:<|}", "", '{q:<|"|>x}', "{q:" + "[" * 9000]


@pytest.mark.parametrize("body", ["lose{}", *(f"find{rest}" for rest in SPOILT)], ids=lambda body: body[:12])
def test_what_gemma_does_not_write_is_no_call(body: str) -> None:
    text = f"<|tool_call>call:{body}<tool_call|>"
    assert read(text) == read(text, 3) == ("", text, [])


def test_a_call_that_is_cut_or_spoilt_ends_where_it_was() -> None:
    head = '<tool_call>{"name": "find", "arguments": '
    for text, arguments in (
        (head + '{"q": "a', '{"q": "a'),
        (head + '{"q": a}}</tool_call>', '{"q": a}'),
        (head + '{"q": 1}, }</tool_call>', '{"q": 1}'),
        ('{"name": "find", "arguments": {"q": 1', '{"q": 1'),
    ):
        said, calls, _ = in_parts(text, 1)
        assert (said, [c.arguments for c in calls]) == ("", [arguments]), text
    assert in_parts('{"name": "find", "arguments": {}} is what I call', 3)[0] == "is what I call"
    assert in_parts(f"{head}{{}}}}</tool_call> and {head}{{}}}}</tool_call>", 1)[0] == " and"
    forced: dict[str, Any] = {"reading": {"forced": True}}
    assert [c.arguments for c in in_parts('{"name": "find", "arguments": {"q": "a', 1, **forced)[1]] == ['{"q": "a']


def test_harmony_s_calls_come_in_pieces() -> None:
    call = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>{} <|call|>"
    text = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant" + call.format('{"q": "a<b", "n": 1}')
    for size in (1, 5):
        said, calls, parts = in_parts(text, size, channels=True)
        assert (said, [json.loads(c.arguments) for c in calls]) == ("", [{"q": "a<b", "n": 1}])
        assert len(parts[0]) > 3
    said, calls, _ = in_parts(call.format("no object"), 3, channels=True)
    assert (said, calls) == ("no object ", [])


def test_long_arguments_are_read_once() -> None:
    text = '<tool_call>{"name": "find", "arguments": {"q": "' + 'x{\\"' * 15_000 + '"}}</tool_call>'
    assert len(in_parts(text, 7)[2][0]) > 5_000


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_every_family_are_read_as_they_are_written(name: str) -> None:
    for given in (ARGUMENTS[:1], ARGUMENTS):
        calls = [Call("find", json.dumps(a)) for a in given]
        text = written(name, calls)
        wanted = [("find", a) for a in given]
        for size in (None, 0, 1, 7):
            assert read(f"Look:\n{text}\n", size) == ("", "Look:", wanted), size
            assert read(f"<think>So {text}?</think>\n\n{text}", size) == (f"So {text}?", "", wanted)
        other = text.replace("find", "lose")
        for size in (None, 0, 1):
            assert read(other, size) == ("", other, []), "a tool that is not among those of the request"


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('<tool_call>{"name": "find", "arguments": {"q": "</tool_call>"}}</tool_call>', "find", {"q": "</tool_call>"}),
        ('<tool_call>\n{"name": "find", "arguments": "{\\"n\\": 1}"}', "find", {"n": 1}),
        ("<tool_call>find\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>", "find", {"n": 5}),
        ("<tool_call>find\n</tool_call>", "find", {}),
        (
            "<tool_call>\n<function=find>\n<parameter=q>\n<b>\n</tool_call>\n\n</parameter>\n<parameter=n>\n7\n</parameter>\n"
            "</function>\n</tool_call>",
            "find",
            {"q": "<b>\n</tool_call>\n", "n": 7},
        ),
        ("<function=find>\n<parameter=q>12</parameter>\n</function>\n</tool_call>", "find", {"q": "12"}),
        ('<function=find>{"q": "x"}</function>', "find", {"q": "x"}),
        ('<|tool_call>call:find{q:<|"|><tool_call|><|"|>, n : 5}<tool_call|>', "find", {"q": "<tool_call|>", "n": 5}),
        (
            '<|tool_call>call:find{<|"|>q<|"|>:two words,deep:{a:[1,{b:null},0.5],c:true}}<tool_call|>',
            "find",
            {"q": "two words", "deep": {"a": [1, {"b": None}, 0.5], "c": True}},
        ),
        ('[TOOL_CALLS][{"name": "find", "arguments": {"q": "x"}, "id": "abcdefghi"}]', "find", {"q": "x"}),
        ('[TOOL_CALLS] find[CALL_ID]abcdefghi[ARGS]{"q": "[TOOL_CALLS]"}', "find", {"q": "[TOOL_CALLS]"}),
        ('{"type": "function", "name": "find", "parameters": {"n": 2}}', "find", {"n": 2}),
        ('<|python_tag|>{"name": "find", "parameters": {"n": 2}}', "find", {"n": 2}),
        ('<|python_tag|>find.call(q="x", n=-2)', "find", {"q": "x", "n": -2}),
        ("[find(q='x', deep={'a': [None, True]})]", "find", {"q": "x", "deep": {"a": [None, True]}}),
        ("[swim.far(n=1)]", "swim.far", {"n": 1}),
        (r"[find(q='\d+')]", "find", {"q": r"\d+"}),
        ("<tool_call>find<arg_key>n</arg_key><arg_value>NaN</arg_value></tool_call>", "find", {"n": "NaN"}),
        ('<|tool_call|>[{"name": "find", "arguments": {"n": 1}}]<|/tool_call|>', "find", {"n": 1}),
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{"q": "x"}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "find",
            {"q": "x"},
        ),
        (
            '<minimax:tool_call>\n<invoke name="find">\n<parameter name="q">a</parameter>\n'
            '<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>',
            "find",
            {"q": "a", "n": 3},
        ),
    ],
)
def test_calls_as_models_are_known_to_write_them(text: str, name: str, arguments: dict[str, Any]) -> None:
    for size in (None, 0, 1, 5):
        assert read(text, size) == ("", "", [(name, arguments)]), size


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>prose about <tool_call> and its end </tool_call> too",
        "<function=find",
        "<function=find><parameter=q>never ends",
        "[TOOL_CALLS] and [ARGS]",
        '[TOOL_CALLS]find[ARGS]{"q": "cut',
        "<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>",
        "[find(q=__import__('os'))]",
        "[find('positional')]",
        "[find(**{'q': 'x'})]",
        "[find(q=1)",
        "[find(" + "[" * 5000,
        "<|python_tag|>print(1)",
        '<tool_call>{"name": "find", "arguments": {"n": NaN}}</tool_call>',
        '{"name": "find", "arguments": {"n": 1e999}}',
        '{"name": "find", "arguments": {"q": "\\ud800"}}',
        "[find(n=1e999)]",
        '<tool_call>{"name": "find", "arguments": {"q": "' + "</tool_call>" * 200 + '"}}</tool_call>',
        '{"name": "find", "arguments": [1]}',
        '{"type": "object", "name": "find"}',
        "</tool_call>",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    for size in (None, 0, 1):
        assert read(text, size) == ("", text, []), size


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>So <b>.",
         ("Why?", "So <b>.", [])),
        ("<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>",
         ("A\nB", "", [])),
        ('<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"q": "<|x|>"}',
         ("", "", [("find", {"q": "<|x|>"})])),
        ('<|channel|>analysis<|message|>A<|end|><|start|>assistant to=functions.find<|channel|>commentary json<|message|>'
         '{"n": 1}<|call|>', ("A", "", [("find", {"n": 1})])),
        (' to=functions.find<|channel|>commentary<|message|>{"n": 1}', ("", "", [("find", {"n": 1})])),
        ('<|channel|>commentary<|message|>Let me.<|end|>'
         '<|start|>assistant<|channel|>commentary to=functions.lose<|message|>{}',
         ("", "Let me.{}", [])),
        ('<|channel|>commentary to=functions.find<|message|>{"q": "cut', ("", '{"q": "cut', [])),
        ("Plain < text", ("", "Plain < text", [])),
        ("<|channel|>analysis<|message|>cut", ("cut", "", [])),
    ],
)  # fmt: skip
def test_channels_are_told_apart(text: str, wanted: Any) -> None:
    for size in (None, 0, 1, 5):
        assert read(text, size, channels=True) == wanted, size


def test_templates_get_histories_as_they_want_them() -> None:
    given = {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [
        {"id": "call_12345", "function": {"name": "find", "arguments": '{"n": 1}'}}]}  # fmt: skip
    for template, wanted in (
        ("{{ tool_call.arguments | tojson }}", {"n": 1}),
        ("{{ tool['function']['arguments'] + '\n' }}", '{"n": 1}'),
        ("{% if call.arguments is string %}{{ call.arguments }}{% endif %}", {"n": 1}),
    ):
        made = _fitted(given, template)
        assert made["tool_calls"][0]["function"]["arguments"] == wanted
        assert (made["thinking"], made["tool_calls"][0]["id"]) == ("Hm", "call_12345")
    assert given["tool_calls"][0]["function"]["arguments"] == '{"n": 1}', "the message itself is left as it was"  # type: ignore[index]
    back = {"role": "tool", "tool_call_id": "call_12345", "content": "1"}
    nine = "{% if tool_call.id is not defined or tool_call.id|length != 9 %}{{ raise_exception('9') }}{% endif %}"
    id = _fitted(back, nine)["tool_call_id"]
    assert (len(id), id) == (9, _fitted(given, nine)["tool_calls"][0]["id"])
    taught = _taught(
        [{"role": "user", "content": "a"}, given, back, {"role": "user", "content": "b"}], TOOLS, "{{ system }}"
    )
    assert [m["role"] for m in taught] == ["system", "user", "assistant", "user"]
    assert '"swim.far"' in taught[0]["content"]
    assert read(taught[2]["content"])[2] == [("find", {"n": 1})]
    assert taught[3]["content"] == "<tool_response>\n1\n</tool_response>\nb"
    assert _taught([{"role": "user", "content": "a"}], TOOLS, BUILTIN_TEMPLATES["chatml"])[0]["content"].endswith("\n\na")


def test_how_much_is_thought_is_said_in_the_templates_words() -> None:
    off = {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
    on = {"enable_thinking": True, "thinking": True}
    assert (thinking(None, ""), thinking(False, ""), thinking("none", ""), thinking(True, "")) == ({}, off, off, on)
    assert thinking("xhigh", "")["reasoning_effort"] == "high"
    assert thinking("none", "{% if reasoning_effort in ['none', 'high'] %}")["reasoning_effort"] == "none"
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "minimal"})
    assert body.reasoning_effort == "minimal"


def test_a_control_token_is_seen_where_it_is_named() -> None:
    with quarrel.load("demo", backend="cpu", n_ctx=64) as llm:
        (end,) = llm.tokenizer.stop_ids
        name = llm.tokenizer.token_text(end)
        for names, shown in (((name, "[TOOL_CALLS]"), True), ((), False)):
            request = llm.prepare("Once", names=names, max_tokens=1)
            detokenizer = request.texts.detokenizer()
            assert (detokenizer.push(end) == name) == shown


THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }} Once <think>\n"
TURNS: Any = [{"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module", name="made")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("t"), rates=Rates(requests=0), chat_template=THINKING)
    with running(settings) as live:
        yield live


WROTE = ["Hm", "m.</th", "ink>\n\nSo", ' <tool_call>{"name": "find", "arg', 'uments": {}}</tool_call>']


def test_thoughts_have_a_place_of_their_own_in_every_protocol(made: Live, written: list[str]) -> None:
    written[:] = WROTE
    with openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"model": "demo", "messages": TURNS, "tools": TOOLS, "reasoning_effort": "low"}
        whole = client.chat.completions.create(**options)
        message = whole.choices[0].message
        assert (message.content, message.reasoning_content) == ("So", "Hmm.")  # type: ignore[attr-defined]
        assert message.tool_calls
        assert whole.usage.completion_tokens_details.reasoning_tokens > 0  # type: ignore[union-attr]
        deltas = [
            c.choices[0].delta.model_dump(exclude_none=True) for c in client.chat.completions.create(**options, stream=True)
        ]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hmm."
        assert "".join(d.get("content", "") for d in deltas) == "So"
        assert all(len(d) == 1 for d in deltas[1:-1])
        tools: Any = [{"type": "function", **t["function"]} for t in TOOLS]
        asked: Any = {"model": "demo", "input": "Why?", "tools": tools, "reasoning": {"effort": "low"}}
        events = list(client.responses.create(**asked, stream=True))
        final = events[-1].response  # type: ignore[union-attr]
        assert [i.type for i in final.output] == ["reasoning", "message", "function_call"]
        assert final.output[0].content[0].text == "Hmm."  # type: ignore[union-attr, index]
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Hmm."
        assert [e.sequence_number for e in events] == list(range(len(events)))
        again = [i.model_dump(exclude_none=True) for i in final.output]
        back: Any = [{"role": "user", "content": "Why?"}, *again]
        back.append({"type": "function_call_output", "call_id": again[2]["call_id"], "output": "1"})
        follow = client.responses.with_raw_response.create(**{**asked, "input": back})
        assert follow.headers.get("x-quarrel-ignored") is None
        with client.responses.stream(**asked) as stream:
            assert stream.get_final_response().output_text == "So"
    other = ollama.Client(host=made.url)
    for rows in (
        [other.chat("demo", TURNS, tools=TOOLS, think=True)],
        list(other.chat("demo", TURNS, tools=TOOLS, stream=True)),
    ):
        assert "".join(r.message.thinking or "" for r in rows) == "Hmm."
        assert "".join(r.message.content or "" for r in rows) == "So"
    assert other.generate("demo", "Why?", think=True).thinking == "Hmm."
    assert other.generate("demo", "Why?", raw=True).response.startswith("Hmm.</think>")
    other._client.close()


def test_an_answer_in_a_form_is_no_thought(made: Live, written: list[str]) -> None:
    written[:] = ['{"a": ', "1}"]
    body = {"messages": TURNS, "response_format": {"type": "json_object"}}
    message = made.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": '{"a": 1}'}
