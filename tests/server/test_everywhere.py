"""What holds in every protocol alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quarrel.server import Rates, Settings
from quarrel.server.body import parse_body
from quarrel.server.lines import dumps, event, line
from quarrel.server.ollama_bodies import OllamaChat, OllamaGenerate
from quarrel.server.response_bodies import ResponsesBody
from quarrel.server.schemas import ChatBody, CompletionBody, EmbeddingsBody, GenerateBody
from tests.server.conftest import Live, running

TURNS = [{"role": "user", "content": "a"}]
ODD = "a\u0085b\u2028c\u2029d"
FORM: Any = {"type": "object", "properties": {"a": {"enum": [ODD]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module", name="both")
def _both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("b"), rates=Rates(requests=0), ollama=True, chat_template="chatml")
    with running(settings) as made:
        yield made


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (CompletionBody, {"prompt": "a"}),
        (ChatBody, {"messages": TURNS}),
        (EmbeddingsBody, {"input": "a"}),
        (ResponsesBody, {"input": "a"}),
        (GenerateBody, {"prompt": "a"}),
        (OllamaChat, {"model": "m"}),
        (OllamaGenerate, {"model": "m"}),
    ],
)
def test_a_field_that_is_null_was_not_given(schema: Any, body: dict[str, Any]) -> None:
    plain = parse_body(json.dumps(body), schema)
    nulls = {name: None for name in schema.model_fields if name not in body}
    assert parse_body(json.dumps({**nulls, **body, "of nobody": None}), schema) == plain


def test_nulls_deeper_in_were_not_given_either() -> None:
    text = '{"model": "m", "options": {"seed": null, "zap": null}, "messages": [{"role": "u", "zap": null}]}'
    body = parse_body(text, OllamaChat)
    assert (body.unknown(), body.options.seed) == ([], None)
    schema = {"enum": [None], "default": None}  # which are values of the schema's own
    assert parse_body(json.dumps({"model": "m", "format": schema}), OllamaChat).format == schema


STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TURNS, "response_format": {"type": "json_object", "schema": FORM}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 256, "response_format": {"type": "json_object", "schema": FORM}}),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": FORM}}}),
    ("/api/chat", {"model": "demo", "messages": TURNS, "format": FORM}),
    ("/api/generate", {"model": "demo", "prompt": "a", "format": FORM}),
]


@pytest.mark.parametrize(("route", "body"), STREAMS, ids=[route for route, _ in STREAMS])
def test_no_stream_has_a_line_break_within_a_value(both: Live, route: str, body: dict[str, Any]) -> None:
    with both.client.stream("POST", route, json={**body, "stream": True}) as answer:
        lines = [x.removeprefix("data: ") for x in answer.iter_lines()]  # httpx splits as Unicode does
    rows = [json.loads(x) for x in lines if x and not x.startswith(("event: ", "[DONE]"))]
    assert "\\u2028" in json.dumps(rows)


def test_breaks_are_escaped_and_nothing_else() -> None:
    row = {"a": ODD, "b": "\u00e4\n"}
    for made in (dumps(row), line(row).removesuffix("\n"), event(row).removeprefix("data: ").removesuffix("\n\n")):
        assert len(made.splitlines()) == 1
        assert (json.loads(made), "\u00e4" in made) == (row, True)
    assert event(row, "k").startswith("event: k\ndata: {")


@pytest.mark.parametrize("seed", [-(2**63), -5, -1, 0, 2**63])
def test_any_whole_number_of_64_bits_is_a_seed(both: Live, seed: int) -> None:
    texts = set()
    for _ in range(2):
        flat = {"temperature": 50, "top_k": 0, "top_p": 1, "min_p": 0}  # two texts are the same once in 4096 ** 8
        body = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True, "seed": seed, **flat}
        texts.add(both.client.post("/v1/completions", json=body).json()["choices"][0]["text"])
    assert (len(texts) == 1) == (seed != -1)
