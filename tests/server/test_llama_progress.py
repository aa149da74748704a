"""What llama-server's answers tell of a request: how far its prompt is read, what it costs, the fields that are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quarrel.server import Settings
from tests.server.conftest import load, running
from tests.server.test_llama import TEMPLATE, ask, events

PROMPT = "Once upon a time there was a small house. " * 6


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("none"), llama=True, chat_template=TEMPLATE)
    with running(settings, load) as live:
        yield live.client


def test_a_stream_says_how_much_of_its_prompt_has_been_read(engine: httpx.Client) -> None:
    body = {"prompt": PROMPT, "n_predict": 3, "temperature": 0, "return_progress": True, "timings_per_token": True}
    for known in (False, True):
        rows = events(engine, "/completion", **body)
        reports = [row for row in rows if "prompt_progress" in row]
        first, last = reports[0]["prompt_progress"], reports[-1]["prompt_progress"]
        assert first["processed"] == first["cache"] < last["processed"] == last["total"] == rows[-1]["tokens_evaluated"]
        assert (first["cache"] > 0) == known == (last["cache"] > 0)
        assert (reports[0]["timings"]["prompt_n"], reports[0]["timings"]["prompt_ms"]) == (0, 0.0)
        assert reports[-1]["timings"]["prompt_n"] == last["total"] - last["cache"] == rows[-1]["timings"]["prompt_n"]
        assert [row["timings"]["predicted_n"] for row in rows if row["content"]] == [1, 2, 3]
    plain = events(engine, "/completion", prompt=PROMPT, n_predict=3)
    assert not any("prompt_progress" in row or ("timings" in row and not row["stop"]) for row in plain)


def test_a_chat_says_it_too_and_each_text_has_its_logprobs(engine: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    rows = events(engine, "/v1/chat/completions", return_progress=True, **body)
    reports = [row["prompt_progress"] for row in rows if "prompt_progress" in row]
    assert reports[0]["processed"] == reports[0]["cache"]
    assert reports[-1]["processed"] == reports[-1]["total"]
    deltas = [row["choices"][0] for row in rows if row["choices"][0]["delta"].get("content")]
    assert deltas
    assert all(len(d["logprobs"]["content"][0]["top_logprobs"]) == 2 for d in deltas)


def test_only_the_fields_that_are_wanted_are_answered(engine: httpx.Client) -> None:
    wanted = ["content", "generation_settings/n_predict", "timings/none", "none"]
    made = ask(engine, "/completion", prompt="Once", n_predict=3, response_fields=wanted)
    assert set(made) == {"content", "generation_settings/n_predict"}
    assert made["generation_settings/n_predict"] == 3
    assert events(engine, "/completion", prompt="Once", n_predict=1, response_fields=["stop"])[-1] == {"stop": True}
    assert "timings" in ask(engine, "/completion", prompt="Once", n_predict=1, response_fields=[])


def test_settings_name_the_biases_that_were_used(engine: httpx.Client) -> None:
    def biases(**body: Any) -> Any:
        return ask(engine, "/completion", prompt="Once", n_predict=1, **body)["generation_settings"]["logit_bias"]

    assert biases() == []
    assert biases(logit_bias=[[7, 2.5], [8, False]]) == [{"token": 7, "bias": 2.5}, {"token": 8, "bias": None}]
    assert biases(ignore_eos=True) == [{"token": 2, "bias": None}]


def test_the_first_token_costs_no_step(engine: httpx.Client) -> None:
    t = ask(engine, "/completion", prompt="Once", n_predict=1, ignore_eos=True)["timings"]
    assert (t["predicted_n"], t["predicted_per_second"], t["predicted_per_token_ms"]) == (1, 0.0, 0.0)
