"""Samplers in llama.cpp's order, or in any other: against formulas written out, and by the frequencies of many draws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quarrel.engine import SamplingParams, merged
from quarrel.engine.ordered import dynamic, top_n_sigma
from quarrel.engine.params import ORDER
from quarrel.errors import RequestError
from tests.engine.test_chain import PLAIN, ROW, P, assert_near, at, chain, draw, frequencies


def test_top_n_sigma_keeps_logits_within_so_many_deviations() -> None:
    mean = sum(map(float, ROW)) / len(ROW)
    sigma = math.sqrt(sum((float(x) - mean) ** 2 for x in ROW) / len(ROW))
    for n in (0.3, 1.0, 2.0, 9.0):
        kept = [i for i, x in enumerate(ROW) if float(x) >= float(ROW[0]) - n * sigma]
        assert_near(frequencies(top_n_sigma=n), at(*kept))


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=50), st.floats(0.01, 5), st.floats(-30, 30))
def test_top_n_sigma_does_not_care_for_what_is_added_to_all(logits: list[float], n: float, more: float) -> None:
    x = np.array([*logits, -np.inf])
    mask = top_n_sigma(x, n)
    assert mask[np.argmax(x)]
    assert not mask[-1]
    near = np.abs(x[:-1] - (x.max() - n * x[:-1].std())) > 1e-6  # but for the last bits at the edge
    assert (mask[:-1] == top_n_sigma(x + more, n)[:-1])[near].all()


def test_the_temperature_of_a_sure_model_is_low_and_of_an_unsure_one_high() -> None:
    entropy = -float((P * np.log(P)).sum()) / math.log(len(P))
    x = np.log(P)
    assert dynamic(x, 1.0, 0.5, 1.0) == pytest.approx(0.5 + entropy)
    assert dynamic(x, 1.0, 0.5, 2.0) == pytest.approx(0.5 + entropy**2)
    assert dynamic(np.zeros(5), 1.0, 0.5, 3.0) == pytest.approx(1.5)
    assert dynamic(np.array([0.0, -80.0, -80.0]), 1.0, 0.5, 1.0) == pytest.approx(0.5)
    assert dynamic(np.array([1.0, -np.inf]), 0.7, 0.5, 1.0) == 0.7  # nothing to choose from
    assert dynamic(np.array([0.0, -80.0]), 0.2, 0.9, 1.0) > 0
    t = 0.5 + entropy
    assert_near(frequencies(dynatemp_range=0.5), P ** (1 / t))


def test_cuts_before_the_temperature_and_behind_it() -> None:
    # At temperature 3 the six are nearly alike, so that 0.7 of their sum takes more of them.
    flat = P ** (1 / 3)
    count = int(np.searchsorted(np.cumsum(flat / flat.sum()), 0.7)) + 1
    assert count > 3
    behind = frequencies(samplers=("temperature", "top_p"), temperature=3.0, top_p=0.7)
    assert_near(behind, np.where(np.arange(6) < count, flat, 0.0))
    before = frequencies(samplers=("top_p", "temperature"), temperature=3.0, top_p=0.7)
    assert_near(before, np.where(np.arange(6) < 3, flat, 0.0))


def test_what_an_order_leaves_out_is_off() -> None:
    assert_near(frequencies(samplers=("min_p",), min_p=0.3, top_k=1, temperature=0.1), at(0, 1, 2))
    assert_near(frequencies(samplers=("xtc",), xtc_probability=1.0, xtc_threshold=0.12), at(2, 3, 4, 5))
    assert_near(frequencies(samplers=("typical_p",), typical_p=0.3), at(1, 2))
    seen = [0, 0, 0]
    assert_near(frequencies(tokens=seen, samplers=("top_k",), top_k=2, presence_penalty=50.0), at(0, 1))
    penalised = frequencies(tokens=seen, samplers=("top_k", "penalties"), top_k=2, presence_penalty=50.0)
    assert_near(penalised, at(1, 2))
    assert not merged(PLAIN, {"samplers": ("top_k",), "dry_multiplier": 1.0}).dries


def test_a_cut_twice_is_a_cut_once() -> None:
    assert merged(PLAIN, {"samplers": ("top_k", "temperature", "top_k"), "top_k": 3}).order == ("top_k", "temperature")


def test_adaptive_p_comes_near_its_target_on_the_average() -> None:
    row = np.log(1.0 / np.arange(1, 9)).astype(np.float32)
    shares = np.exp(row) / np.exp(row).sum()
    means = []
    for target in (0.05, 0.15, 0.3):
        c = chain(adaptive_target=target)
        drawn = [draw(c, row, i) for i in range(600)]
        means.append(float(shares[drawn].mean()))
    assert means == sorted(means)
    assert means[2] > means[0] + 0.05


def test_adaptive_p_draws_by_its_formula_and_aims_beside_what_it_drew() -> None:
    def weights(aim: float) -> np.ndarray:  # type: ignore[type-arg]
        d = np.abs(P - aim) / 0.3
        return np.exp(5 - 10 * d * d / (1 + d))

    first = [chain(adaptive_target=0.15, adaptive_decay=0.5) for _ in range(4000)]
    found = np.bincount([draw(c, ROW, i) for i, c in enumerate(first)], minlength=6) / 4000
    assert_near(found, weights(0.15))
    # After a token of 0.4: the sum is 0.4 + 0.5 * 0.3 and its weight 2, so that the aim is 0.3 - 0.275.
    drew = [(c, i) for i, c in enumerate(first) if draw(chain(adaptive_target=0.15, adaptive_decay=0.5), ROW, i) == 0]
    again = np.bincount([draw(c, ROW, 10_000 + i) for c, i in drew], minlength=6) / len(drew)
    wanted = weights(0.025)
    assert np.abs(again - wanted / wanted.sum()).max() < 5 * math.sqrt(0.25 / len(drew))


@pytest.mark.parametrize("order", list(itertools.permutations(("top_k", "min_p", "temperature")))[:4])
def test_few_candidates_are_drawn_from_as_all_would_be(order: tuple[str, ...]) -> None:
    """Where top_k comes first, only the most likely of a long row are looked at; what is drawn is the same."""
    row = np.random.default_rng(5).standard_normal(9000).astype(np.float32) * 3
    options = {"samplers": order, "top_k": 20, "min_p": 0.01, "temperature": 1.4}
    short, whole = chain(**options), chain(**options)
    whole._likely = lambda *_: None  # type: ignore[method-assign]
    assert [draw(short, row, i) for i in range(60)] == [draw(whole, row, i) for i in range(60)]


def test_the_device_draws_what_has_no_order_and_greedy_needs_none() -> None:
    assert SamplingParams().on_device
    for options in ({"samplers": ("top_k",)}, {"top_n_sigma": 1.0}, {"dynatemp_range": 0.1}, {"adaptive_target": 0.5}):
        assert not merged(PLAIN, options).on_device  # type: ignore[arg-type]
        assert merged(PLAIN, {**options, "temperature": 0}).on_device  # type: ignore[typeddict-item]


def test_an_unknown_sampler_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"an entry of samplers is 'top_q', wanted one of penalties, dry") as caught:
        SamplingParams(samplers=("top_k", "top_q"))
    assert caught.value.field == "samplers"
    assert SamplingParams(samplers=list(ORDER)).samplers == ORDER  # type: ignore[arg-type]
