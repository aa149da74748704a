"""Biases, bans and penalties on the device: the tokens of the host's chain, without waiting for a token."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from quarrel.engine import SamplingParams, start
from quarrel.engine.listed import Listed, lists_of
from quarrel.engine.params import Sampling, merged
from quarrel.errors import RequestError
from quarrel.ops.adjust import MOST_LISTED
from tests.engine.toys import STOP, VOCABULARY, Toy, request

PROMPT = [1, 2, 3, 4, 5]

HOST: Sampling = {"dry_multiplier": 1.0, "dry_allowed_length": 1 << 30}
"""Changes nothing, but the host draws."""
BASE = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.8, "presence_penalty": -0.3, "penalty_last_n": 7},
        {"presence_penalty": 2.0, "penalty_last_n": 1},
        {"repetition_penalty": 1.3, "temperature": 0.0},
        {"logit_bias": {4: 3.0, 9: -math.inf, 11: -2.0}, "frequency_penalty": 0.5},
        {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": (4, 7)},
        {"logprobs": 2, "repetition_penalty": 1.2, "logit_bias": {4: 1.0}},
    ],
)
def test_tokens_are_the_host_s_and_no_step_waits_for_them(options: Sampling) -> None:
    params = merged(BASE, options)
    with Toy(late=True) as toy:
        toy.step.scale = 1.0
        device, plain = toy.generate(PROMPT, params), toy.generate(PROMPT, BASE)
        assert not {"logits", "both", "all"} & set(toy.step.wants)
        assert toy.step.most_flying == 2
        host = toy.generate(PROMPT, merged(params, HOST))
        assert device.token_ids == host.token_ids
        assert device.token_ids != plain.token_ids


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {4: 3.0}}])
def test_a_grammar_s_mask_is_laid_by_the_device(options: Sampling) -> None:
    params = merged(BASE, options)
    with Toy(late=True) as toy:
        toy.step.scale = 1.0

        def guided(params: SamplingParams) -> tuple[int, ...]:
            asked = replace(request(PROMPT, params), guide=Circle)
            free, beside = toy.hold(), toy.start([9, *PROMPT], BASE)
            stream = start(toy.loop, asked, stream=False)
            free()
            assert beside.wait().token_ids == plain
            return stream.wait().token_ids

        plain = toy.generate([9, *PROMPT], BASE).token_ids
        device = guided(params)
        assert not {"logits", "both", "all"} & set(toy.step.wants)
        assert all((b - a) % 40 in range(1, 6) for a, b in pairwise(device))
        assert guided(merged(params, HOST)) == device
        assert "both" in toy.step.wants
        # What may leave no token to draw, and what is told by the host.
        for told in ({"logit_bias": {4: -math.inf}}, {"min_tokens": 3, "ignore_eos": False}, {"logprobs": 1}):
            toy.step.wants.clear()
            guided(merged(params, told))  # type: ignore[arg-type]
            assert {"both", "logits", "all"} & set(toy.step.wants)


def test_a_grammar_that_cannot_go_on_ends_its_own_request_alone() -> None:
    with Toy(late=True) as toy:
        alone = toy.generate([9, *PROMPT], BASE).token_ids
        free, beside = toy.hold(), toy.start([9, *PROMPT], BASE)
        stream = start(toy.loop, replace(request(PROMPT, BASE), guide=Stuck), stream=False)
        free()
        result = stream.wait()
        assert (result.finish_reason, result.error) == ("error", "the structure goes no further")
        assert len(result.token_ids) == 3
        assert beside.wait().token_ids == alone


class Circle:
    """A grammar: each token is 1 to 5 more than the one before, in a circle of 40; behind 20 tokens nothing follows."""

    ends: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.last, self.taken = 0, 0

    def allowed(self) -> np.ndarray:
        mask = np.zeros(VOCABULARY, bool)
        mask[[1 + (self.last + i) % 40 for i in range(1, 6)]] = True
        return mask

    def take(self, token: int) -> bool:
        assert self.allowed()[token]
        self.last, self.taken = token - 1, self.taken + 1
        return self.taken == 20


class Stuck(Circle):
    """It fits no text behind three tokens."""

    def allowed(self) -> np.ndarray:
        if self.taken == 3:
            raise RequestError("the structure goes no further")
        return super().allowed()


def test_rows_with_lists_and_rows_without_share_a_step() -> None:
    chosen = [BASE, merged(BASE, {"repetition_penalty": 1.4}), merged(BASE, {"logit_bias": {4: 9.0}}), BASE]
    with Toy(late=True) as toy:
        alone = [toy.generate([i, *PROMPT], p).token_ids for i, p in enumerate(chosen)]
        free = toy.hold()
        streams = [toy.start([i, *PROMPT], p) for i, p in enumerate(chosen)]
        free()
        assert [s.wait().token_ids for s in streams] == alone


@pytest.mark.parametrize("options", [{"penalty_last_n": -1}, {"penalty_last_n": MOST_LISTED + 2}])
def test_lists_that_are_too_long_stay_on_the_host(options: Sampling) -> None:
    with Toy() as toy:
        toy.generate(PROMPT, merged(BASE, {"presence_penalty": 0.5, **options}))
        assert "logits" in toy.step.wants


def test_a_list_is_what_the_penalties_look_at_without_the_last_token() -> None:
    params = merged(BASE, {"presence_penalty": 0.5, "penalty_last_n": 3, "logit_bias": {8: 2.0}, "min_tokens": 2})
    listed = Listed(params, {STOP}, n_prompt=2)
    lists = lists_of([(None, [9], (), 1), (listed, [1, 2, 3], (), 3), (listed, [1, 2, 3], (), 4), (listed, [5], (), 1)])
    assert lists.list_end.tolist() == [0, 4, 7, 9]
    assert lists.list_ids.tolist() == [1, 2, 8, STOP, 2, 3, 8, 8, STOP]
    assert lists.list_counts.tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 0]
    assert lists.list_biases.tolist() == [0, 0, 2, -math.inf, 0, 0, 2, 2, -math.inf]
    assert lists.presence.tolist() == [0.0, 0.5, 0.5, 0.5]
    assert lists.sound(4, 10)
    assert not lists.sound(4, 8)
    assert not lists.sound(3, 10)
    assert not replace(lists, list_end=np.array([0, 4, 3, 9], np.int32)).sound(4, 10)
    assert not replace(lists, list_end=np.array([-1, 4, 7, 9], np.int32)).sound(4, 10)


def test_a_wrong_draft_leaves_nothing_in_the_list() -> None:
    listed = Listed(merged(BASE, {"presence_penalty": 0.5}), (), n_prompt=2)
    drafted = lists_of([(listed, [1, 2], [6, 7], end) for end in (2, 3, 4)])
    assert drafted.list_ids.tolist() == [1, 1, 2, 1, 2, 6]
    assert lists_of([(listed, [1, 2, 3, 4], (), 5)]).list_ids.tolist() == [1, 2, 3, 4]
