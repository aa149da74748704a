"""llama-server's protocol, as launchers and clients of llama.cpp speak it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import quarrel
from quarrel.engine import SamplingParams
from quarrel.llm import LLM
from quarrel.server import Settings
from quarrel.server.llama.bodies import CompletionBody
from quarrel.server.llama.completion import infill_ids
from tests.server.conftest import running

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|im_start|>assistant{{ '\n' }}"
)
JSON_GRAMMAR = r"""
root   ::= object
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? ws "}"
value  ::= object | string | number | ("true" | "false" | "null") ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]))* "\""
number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)?  # no exponent
ws ::= ([ \t\n] ws)?
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    def load(source: str) -> LLM:
        return quarrel.load(source, backend="cpu", threads=2, n_ctx=256, max_seqs=2)

    settings = Settings(data_dir=tmp_path_factory.mktemp("none"), llama=True, chat_template=TEMPLATE)
    with running(settings, load) as live:
        live.client.post("/tokenize", json={"content": ""})
        yield live.client


def ask(engine: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = engine.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def events(engine: httpx.Client, path: str, **body: Any) -> list[Any]:
    answer = engine.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [x.removeprefix("data: ") for x in answer.text.split("\n\n") if x]
    return [json.loads(x) for x in lines if x != "[DONE]"]


def test_a_completion_streams_a_token_an_event_and_its_figures_last(engine: httpx.Client) -> None:
    prompt = "Once upon a time"
    *parts, last = events(engine, "/completion", prompt=prompt, n_predict=8, temperature=0, cache_prompt=True)
    whole = ask(engine, "/completion", prompt=prompt, n_predict=8, temperature=0, return_tokens=True)
    assert "".join(p["content"] for p in parts) == whole["content"]
    assert [t for p in parts for t in p["tokens"]] == whole["tokens"]
    assert [p["tokens_predicted"] for p in parts] == list(range(1, 9))
    assert all((p["stop"], p["tokens_evaluated"], p["index"]) == (False, 5, 0) for p in parts)
    for end in (last, whole):
        assert (end["stop"], end["stop_type"], end["truncated"], end["stopping_word"]) == (True, "limit", False, "")
        assert (end["tokens_predicted"], end["tokens_evaluated"], end["tokens_cached"]) == (8, 5, 12)
        assert end["prompt"] == "<s> Once upon a time"
        t = end["timings"]
        assert (t["cache_n"] + t["prompt_n"], t["predicted_n"]) == (5, 8)
        assert t["predicted_per_second"] == pytest.approx(7000 / t["predicted_ms"], rel=0.01)
    assert (last["content"], last["tokens"]) == ("", [])
    assert whole["timings"]["cache_n"] > 0
    fresh = ask(engine, "/completion", prompt=prompt, n_predict=1, cache_prompt=False)
    assert fresh["timings"]["cache_n"] == 0


def test_a_prompt_is_a_text_or_ids_or_both_or_several(engine: httpx.Client) -> None:
    ids = ask(engine, "/tokenize", content="Once upon a time", add_special=True)["tokens"]
    assert ids == [1, 2634, 656, 261, 529]
    wanted = ask(engine, "/completion", prompt="Once upon a time", n_predict=6, temperature=0)["content"]
    for prompt in (ids, {"prompt_string": "Once upon a time"}):
        assert ask(engine, "/completion", prompt=prompt, n_predict=6, temperature=0)["content"] == wanted
    mixed = ask(engine, "/completion", prompt=["Once", 656, 261], n_predict=0)
    assert (mixed["prompt"], mixed["tokens_evaluated"]) == ("<s> Once upon a", 4)
    several = ask(engine, "/completion", prompt=[ids, "Once upon a time"], n_predict=6, temperature=0)
    assert [(r["index"], r["content"]) for r in several] == [(0, wanted), (1, wanted)]
    image = {"prompt_string": f"What is {engine.get('/props').json()['media_marker']}?", "multimodal_data": ["aGk="]}
    assert "without a projector" in ask(engine, "/completion", 400, prompt=image)["error"]["message"]


def test_the_likeliest_tokens_come_by_id_with_bytes(engine: httpx.Client) -> None:
    parts = events(engine, "/completion", prompt="Once", n_predict=2, temperature=0, n_probs=3)[:-1]
    first = parts[0]["completion_probabilities"][0]
    assert (first["id"], first["token"], bytes(first["bytes"])) == (656, " upon", b" upon")
    assert first["logprob"] == pytest.approx(-0.0684, abs=0.01)
    assert first["top_logprobs"][0]["id"] == 656
    assert len(first["top_logprobs"]) == 3
    assert sum(math.exp(e["logprob"]) for e in first["top_logprobs"]) <= 1.0001


def test_a_gbnf_grammar_and_a_schema_hold_the_text(engine: httpx.Client) -> None:
    made = ask(engine, "/completion", prompt="Once", n_predict=40, seed=3, grammar=JSON_GRAMMAR)["content"]
    assert made.startswith("{")
    word = ask(engine, "/completion", prompt="Once", n_predict=40, grammar='root ::= "yes" | "no"')
    assert word["content"] in ("yes", "no")
    assert word["stop_type"] == "eos"
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    done = ask(engine, "/completion", prompt="Once", n_predict=120, json_schema=schema)  # 4 gaps of 16 spaces, 16 more
    assert json.loads(done["content"])["a"] in (True, False)
    both = ask(engine, "/completion", 400, prompt="a", json_schema=schema, grammar='root ::= "a"')
    assert "not both" in both["error"]["message"]
    for bad in ('root ::= "a', "root ::= other", "::=", "no rule at all"):
        error = ask(engine, "/completion", 400, prompt="a", grammar=bad)["error"]
        assert (error["code"], error["type"]) == (400, "invalid_request_error")


def test_control_tokens_are_written_where_a_parser_wants_them(engine: httpx.Client) -> None:
    body = {"prompt": "Once", "n_predict": 2, "temperature": 0, "logit_bias": {"1": 100}}
    assert ask(engine, "/completion", **body)["content"] == ""
    named = ask(engine, "/completion", **body, preserved_tokens=["<s>", "no token", ""])
    assert (named["content"], named["tokens_predicted"]) == ("<s><s>", 2)
    chat = {"messages": [{"role": "user", "content": "a"}], **body, "preserved_tokens": ["<s>"]}
    assert ask(engine, "/v1/chat/completions", **chat)["choices"][0]["message"]["content"] == "<s><s>"


def test_a_stop_string_and_the_ends_of_a_text(engine: httpx.Client) -> None:
    said = ask(engine, "/completion", prompt="Once upon a time", n_predict=20, temperature=0)["content"]
    word = said.split()[2]
    cut = ask(engine, "/completion", prompt="Once upon a time", n_predict=20, temperature=0, stop=[word, ""])
    assert (cut["stop_type"], cut["stopping_word"], cut["content"]) == ("word", word, said[: said.index(word)])
    full = ask(engine, "/completion", prompt="Once upon a time", n_predict=-1, ignore_eos=True)
    assert (full["stop_type"], full["truncated"]) == ("limit", True)
    assert full["tokens_evaluated"] + full["tokens_predicted"] == 256


def test_a_prompt_that_leaves_no_room_is_told_by_its_numbers(engine: httpx.Client) -> None:
    for path, body in (
        ("/completion", {"prompt": [1] * 256}),
        ("/completion", {"prompt": [1] * 300, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "so many words " * 200}]}),
    ):
        error = ask(engine, path, 400, **body)["error"]
        assert (error["type"], error["code"], error["n_ctx"]) == ("exceed_context_size_error", 400, 256)
        count = error["n_prompt_tokens"]
        assert count >= 256
        shown = f"request ({count} tokens) exceeds the available context size (256 tokens), try increasing it"
        assert error["message"] == shown


def test_chat_has_timings_and_a_finish_of_its_own(engine: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    prompt = ask(engine, "/apply-template", messages=messages)["prompt"]
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == head
    count = len(ask(engine, "/tokenize", content=prompt, add_special=True)["tokens"])
    options = {"messages": messages, "n_predict": 8, "temperature": 0, "repeat_penalty": 1, "top_k": -1, "typical_p": 0}
    first, *middle, last = events(engine, "/v1/chat/completions", **options)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    t = last["timings"]
    assert (t["cache_n"] + t["prompt_n"], t["predicted_n"]) == (count, 8)
    whole = ask(engine, "/v1/chat/completions", **options)
    said = "".join(e["choices"][0]["delta"].get("content", "") for e in middle)
    assert whole["choices"][0]["message"]["content"] == said
    assert whole["timings"]["predicted_n"] == 8
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with_tools = events(engine, "/v1/chat/completions", **options, tools=tools)
    assert with_tools[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert with_tools[-1]["timings"]["cache_n"] + with_tools[-1]["timings"]["prompt_n"] > count
    probable = events(engine, "/v1/chat/completions", **options, logprobs=True, top_logprobs=1)
    entries = [x for e in probable for x in e["choices"][0].get("logprobs", {}).get("content", [])]
    assert len(entries) == 8
    assert all(x["id"] == x["top_logprobs"][0]["id"] for x in entries)  # greedy


def test_tokens_there_and_back(engine: httpx.Client) -> None:
    assert ask(engine, "/tokenize", content="Once upon")["tokens"] == [2634, 656]
    named = ask(engine, "/tokenize", content="<s>Once")["tokens"]
    assert named[0] == 1
    assert ask(engine, "/tokenize", content="<s>Once", parse_special=False)["tokens"][0] != 1
    pieces = ask(engine, "/tokenize", content="Once é", with_pieces=True, add_special=True)["tokens"]
    assert pieces[:2] == [{"id": 1, "piece": "<s>"}, {"id": 2634, "piece": " Once"}]
    assert any(isinstance(p["piece"], list) for p in pieces) or any("é" in p["piece"] for p in pieces)
    assert ask(engine, "/detokenize", tokens=[2634, 656])["content"] == " Once upon"


def test_embeddings_in_both_forms_and_as_the_model_makes_them(engine: httpx.Client) -> None:
    (own,) = ask(engine, "/embedding", content="a cat")
    (vector,) = own["embedding"]
    assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-4)
    assert "2049 entries" in ask(engine, "/embedding", 400, content=["a"] * 2049)["error"]["message"]
    (raw,) = ask(engine, "/embedding", content="a cat", embd_normalize=-1)
    length = math.sqrt(sum(x * x for x in raw["embedding"][0]))
    assert abs(length - 1) > 0.01
    assert [x / length for x in raw["embedding"][0]] == pytest.approx(vector, abs=1e-4)
    openai = ask(engine, "/v1/embeddings", input=["a cat", "a dog"])
    assert openai["data"][0]["embedding"] == pytest.approx(vector, abs=1e-5)
    assert openai["usage"]["prompt_tokens"] == sum(d["tokens_evaluated"] for d in openai["data"])
    ask(engine, "/v1/embeddings", 400)
    parts = {"content": [{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]}
    for same in (parts, {"prompt_string": "a cat"}, [parts]):
        assert ask(engine, "/v1/embeddings", input=same)["data"][0]["embedding"] == pytest.approx(vector, abs=1e-5)
    mixed = ask(engine, "/v1/embeddings", input=["a dog", [656, "cat", 261], parts, [656]])["data"]
    assert [row["tokens_evaluated"] for row in mixed] == [3, 3, 3, 1]
    ask(engine, "/v1/embeddings", 400, input=[{}])


def test_what_the_server_says_of_itself(engine: httpx.Client) -> None:
    assert engine.get("/health").json() == {"status": "ok"}
    props = engine.get("/props").json()
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (2, 256)
    assert (props["chat_template"], props["bos_token"], props["modalities"]["vision"]) == (TEMPLATE, "<s>", False)
    assert [(s["id"], s["n_ctx"], s["is_processing"]) for s in engine.get("/slots").json()] == [
        (0, 256, False),
        (1, 256, False),
    ]
    text = engine.get("/metrics").text
    assert "llamacpp:tokens_predicted_total " in text
    assert "quarrel_webui_tokens_total" in text
    error = engine.get("/nothing").json()["error"]
    assert (error["code"], error["type"]) == (404, "not_found_error")
    assert engine.post("/completion", content=b"{").json()["error"]["type"] == "invalid_request_error"


def test_what_is_not_done_as_asked_is_named(engine: httpx.Client) -> None:
    body = {
        "prompt": "a",
        "n_predict": 1,
        "n_probs": 50,
        "samplers": ["top_k", "other"],
        "speculative.n_max": 3,
    }
    answer = engine.post("/completion", json=body)
    assert answer.status_code == 200
    assert answer.headers["X-Quarrel-Ignored"] == "n_probs, samplers, speculative.n_max"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"temperature": -1, "top_k": -1, "top_p": 3, "typical_p": 0, "repeat_penalty": 0}, SamplingParams(
            max_tokens=None, temperature=0, top_k=0, top_p=1)),
        ({"repeat_last_n": -5, "n_predict": 7, "seed": -1}, SamplingParams(max_tokens=7, penalty_last_n=-1)),
        ({"seed": 5, "max_tokens": 3, "stop": "x"}, SamplingParams(max_tokens=3, seed=5, stop="x")),  # type: ignore[arg-type]
        ({"samplers": "kmt"}, SamplingParams(max_tokens=None, samplers=("top_k", "min_p", "temperature"))),
        ({"samplers": ["typ_p", "penalties"]}, SamplingParams(max_tokens=None, samplers=("typical_p", "penalties"))),
        ({"dynatemp_range": 0.5, "top_n_sigma": -1, "adaptive_target": 0.3}, SamplingParams(
            max_tokens=None, dynatemp_range=0.5, adaptive_target=0.3)),
    ],
)  # fmt: skip
def test_numbers_mean_what_they_mean_to_llama_server(given: dict[str, Any], wanted: SamplingParams) -> None:
    assert SamplingParams(**{"max_tokens": None, **CompletionBody(**given).shared()}) == wanted


def test_every_wrong_type_is_a_sentence(engine: httpx.Client) -> None:
    for field in (
        "temperature",
        "top_k",
        "n_predict",
        "stop",
        "logit_bias",
        "grammar",
        "json_schema",
        "samplers",
        "prompt",
    ):
        for value in ({"a": []} if field != "json_schema" else 3, True if field != "json_schema" else "x", [[[]]]):
            answer = engine.post("/completion", json={"prompt": "a", "n_predict": 1, field: value})
            assert answer.status_code in (200, 400), (field, value, answer.text)
    biased = ask(engine, "/completion", prompt="Once", n_predict=1, temperature=0, logit_bias=[[656, False], [" on", 99]])
    assert biased["content"] == " on"
    assert (
        ask(engine, "/completion", prompt="Once", n_predict=1, temperature=0, logit_bias={"656": -100})["content"]
        != " upon"
    )
    huge = 10**400
    for odd in ([[5, huge], [5, -huge], [True, 1], [1.5, 1], [{}, 1], [[], 1], [huge, 1]], {"\u00b2": 1, "1" * 5000: 1}):
        made = ask(engine, "/completion", prompt="Once", n_predict=1, temperature=0, logit_bias=odd)
        said = [(row["token"], row["bias"]) for row in made["generation_settings"]["logit_bias"]]
        assert (5, -100.0) in said if isinstance(odd, list) else said
        assert (1, 1.0) not in said


class _Fim:
    """Stands for a model with the tokens of a text with a hole in it."""

    def __init__(self, model: LLM) -> None:
        self.tokenizer, self._model = self, model
        self.fim_ids = {"prefix": 1001, "suffix": 1002, "middle": 1003, "separator": 1004}
        self.bos_id, self.add_bos, self.tokenize = 1, True, model.tokenize


def test_a_hole_in_a_text_is_put_between_its_tokens(engine: httpx.Client) -> None:
    from quarrel.server.llama.bodies import InfillBody

    assert "prefix token is missing" in ask(engine, "/infill", 501, input_prefix="a")["error"]["message"]
    with quarrel.load("demo", backend="cpu", n_ctx=64) as llm:
        extra = [{"text": "the", "filename": "x"}]
        body = InfillBody(input_prefix="Once", input_suffix="time", prompt=" upon", input_extra=extra)
        ids = infill_ids(_Fim(llm), body)  # type: ignore[arg-type]
        words = [llm.tokenize(w, False) for w in ("x\n", "the", "Once", " upon", "time")]
    assert ids == [1, 1004, *words[0], *words[1], 1001, *words[2], *words[3], 1002, *words[4], 1003]


def test_a_short_key_is_taken_from_a_launcher(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, llama=True, api_keys=("abc",))
    with running(settings) as live:
        refused = live.client.post("/tokenize", json={"content": "a"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        good = live.client.post("/tokenize", json={"content": "a"}, headers={"Authorization": "Bearer abc"})
        assert good.status_code == 200
