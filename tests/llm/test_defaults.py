"""Sampling settings that a model brings along."""

from __future__ import annotations

import json

import pytest

from quarrel.engine import SamplingParams
from quarrel.llm.defaults import defaults_of


def test_without_any_the_defaults_hold() -> None:
    assert defaults_of(None) == SamplingParams()


def test_ollama_s_names_become_ours() -> None:
    given = {"temperature": 0.3, "repeat_penalty": 1.2, "repeat_last_n": 99, "stop": ["<end>", "user:"], "num_predict": 40}
    made = defaults_of(json.dumps({**given, "num_ctx": 4096, "num_gpu": 1}))
    assert made == SamplingParams(
        temperature=0.3, repetition_penalty=1.2, penalty_last_n=99, stop=("<end>", "user:"), max_tokens=40
    )


def test_without_a_limit_means_ours() -> None:
    assert defaults_of('{"num_predict": -1}').max_tokens == SamplingParams().max_tokens


def test_a_file_s_keys_come_first_and_a_store_s_parameters_go_before_them() -> None:
    keys = {"general.sampling.temp": 0.25, "general.sampling.top_k": 7, "general.sampling.penalty_repeat": 1.5}
    assert defaults_of(None, keys) == SamplingParams(temperature=0.25, top_k=7, repetition_penalty=1.5)
    assert defaults_of('{"temperature": 0.5}', keys).temperature == 0.5
    wrong = {"general.sampling.temp": "hot", "general.sampling.min_p": 0.5, "general.sampling.sequence": "k"}
    with pytest.warns(UserWarning, match="a default of this model is left out: temperature is"):
        assert defaults_of(None, wrong) == SamplingParams(min_p=0.5)


def test_what_is_out_of_range_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="a default of this model is left out: temperature is -3"):
        assert defaults_of('{"temperature": -3, "top_k": 7}') == SamplingParams(top_k=7)


def test_what_is_no_json_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="no JSON"):
        assert defaults_of("{") == SamplingParams()
    assert defaults_of("[1]") == SamplingParams()
