"""Every field of a request is checked by type and range, and each refusal names the field, the value and the range."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quarrel.engine import Sampling, SamplingParams, merged
from quarrel.errors import RequestError

NUMBERS = [f for f in dataclasses.fields(SamplingParams) if "range" in f.metadata]
ODD: list[Any] = [math.nan, math.inf, -math.inf, True, False, "5", "", [], {}, 1j, b"1", 2**63, -(2**63), 10**400, 1e308]


def make(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{name: value})


@pytest.mark.parametrize("field", NUMBERS, ids=lambda f: f.name)
def test_each_number_takes_its_limits_and_nothing_beyond(field: dataclasses.Field[Any]) -> None:
    range_ = field.metadata["range"]
    low = range_.low + (1e-9 if range_.above else 0)
    for good in (low, range_.high):
        assert getattr(make(field.name, good), field.name) == good
    beyond = [range_.low - 1, range_.high + 1] + ([range_.low] if range_.above else [])
    for bad in beyond:
        with pytest.raises(RequestError, match=rf"^{field.name} is .*, wanted a .*number"):
            make(field.name, int(bad) if range_.whole else bad)


def outside(field: dataclasses.Field[Any]) -> list[Any]:
    return [value for value in ODD if not (field.name == "seed" and value == 2**63)]


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(f, v, id=f"{f.name}-{v!r:.20}") for f in NUMBERS for v in outside(f)],
)
def test_what_is_no_number_in_range_is_refused(field: dataclasses.Field[Any], value: Any) -> None:
    with pytest.raises(RequestError, match=field.name) as refusal:
        make(field.name, value)
    assert len(str(refusal.value)) < 250


@pytest.mark.parametrize("field", [f for f in NUMBERS if f.metadata["range"].whole], ids=lambda f: f.name)
def test_whole_numbers_take_no_fractions(field: dataclasses.Field[Any]) -> None:
    with pytest.raises(RequestError, match="a whole number"):
        make(field.name, 1.5)


def test_none_is_taken_only_where_it_means_something() -> None:
    optional = {f.name for f in NUMBERS if f.metadata["range"].optional}
    assert optional == {"max_tokens", "seed", "logprobs"}
    for field in NUMBERS:
        if field.name not in optional:
            with pytest.raises(RequestError):
                make(field.name, None)


IDS: list[Any] = [-1, -(2**31), 2**31, 2**63, math.nan, 1.5, "1e9", True, None]


@pytest.mark.parametrize("id", IDS, ids=repr)
def test_token_ids_are_whole_numbers_in_both_fields(id: Any) -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=(id,))
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias={id: 1.0})


def test_token_ids_beyond_the_vocabulary_are_refused_when_it_is_known() -> None:
    SamplingParams(stop_token_ids=(99,), logit_bias={99: 1}).check_vocabulary(100)
    with pytest.raises(RequestError, match=r"stop_token_ids holds the token id 100, wanted ids from 0 to 99"):
        SamplingParams(stop_token_ids=(100,)).check_vocabulary(100)
    with pytest.raises(RequestError, match="logit_bias holds the token id 100"):
        SamplingParams(logit_bias={100: 1}).check_vocabulary(100)


@pytest.mark.parametrize("bias", [math.nan, math.inf, 100.5, "3", None, True])
def test_biases_are_bounded_and_only_minus_infinity_is_infinite(bias: Any) -> None:
    assert SamplingParams(logit_bias={3: -math.inf}).logit_bias == {3: -math.inf}
    with pytest.raises(RequestError, match="the bias of token 3 is"):
        SamplingParams(logit_bias={3: bias})


@pytest.mark.parametrize("value", [5, None, [5], [""], ["x" * 257], ["\ud800"], ["a"] * 17, {"a": 1}, b"stop", [None]])
def test_stop_strings_are_texts_of_sane_length(value: Any) -> None:
    with pytest.raises(RequestError, match="stop"):
        SamplingParams(stop=value)


@pytest.mark.parametrize("value", [5, {1: 2}, "12", range(300), None])
def test_stop_ids_are_a_list_of_sane_length(value: Any) -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=value)


def test_one_stop_string_and_lists_become_tuples() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, np.int64(2)])  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert type(params.stop_token_ids[1]) is int


def test_numpy_numbers_are_numbers_and_numpy_truth_is_not() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int32(7))  # type: ignore[arg-type]
    assert (params.temperature, params.top_k) == (0.5, 7)
    assert type(params.temperature) is float
    with pytest.raises(RequestError):
        SamplingParams(top_k=np.bool_(True))  # type: ignore[arg-type]


def test_ignore_eos_is_a_truth_value() -> None:
    with pytest.raises(RequestError, match="ignore_eos is 1, wanted True or False"):
        SamplingParams(ignore_eos=1)  # type: ignore[arg-type]


def test_a_temperature_too_low_to_tell_from_greedy_is_greedy() -> None:
    assert SamplingParams(temperature=1e-9).temperature == 0.0
    assert SamplingParams(temperature=1e-3).temperature == 1e-3


def test_keywords_are_the_fields_and_no_other() -> None:
    assert set(Sampling.__annotations__) == {f.name for f in dataclasses.fields(SamplingParams)}
    assert merged(SamplingParams(top_k=3), {"seed": 1}) == SamplingParams(top_k=3, seed=1)
    with pytest.raises(RequestError, match="no sampling parameter 'temprature'"):
        merged(SamplingParams(), {"temprature": 1})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({}, True),
        ({"temperature": 0, "mirostat": 2, "typical_p": 0.5, "xtc_probability": 1}, True),
        ({"min_p": 0.3, "top_k": 1, "top_p": 0.1, "seed": 3, "stop": "x", "n": 2, "ignore_eos": True}, True),
        ({"logprobs": 20}, True),
        ({"penalty_last_n": 0, "repetition_penalty": 2.0}, True),
        ({"typical_p": 0.5}, False),
        ({"mirostat": 2}, False),
        ({"xtc_probability": 0.5}, False),
        ({"dry_multiplier": 1, "temperature": 0}, False),
        ({"repetition_penalty": 1.1, "temperature": 0}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"logit_bias": {1: 1}}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_the_device_draws_what_its_settings_and_its_lists_of_tokens_say(options: Sampling, device: bool) -> None:
    assert merged(SamplingParams(), options).on_device is device


@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]), st.from_type(object)))
def test_anything_at_all_makes_params_or_a_request_error(options: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**options)
    except RequestError as error:
        assert "wanted" in str(error)
    else:
        assert isinstance(params, SamplingParams)
