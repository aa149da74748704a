"""How likely a prompt's own tokens were, in one pass with its continuation, whatever the steps are cut into."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from quarrel.engine import Result, SamplingParams, TokenLogprob, start
from quarrel.engine.chain import token_logprob
from quarrel.errors import Diverged
from tests.engine.toys import Toy, extend, limits, request

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)


def wanted_of(toy: Toy, prompt: list[int]) -> tuple[TokenLogprob, ...]:
    found, history = [], 0
    for token, after in itertools.pairwise(prompt):
        history = extend(history, token)
        found.append(token_logprob(toy.step.logits(history, token), after, 2))
    return tuple(found)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("n_blocks", [40, 14])  # 14: not all fit at once, some begin again
def test_they_are_those_of_the_logits(late: bool, n_blocks: int) -> None:
    draw = random.Random(3)
    prompts = [[draw.randrange(1, 40) for _ in range(length)] for length in (1, 2, 15, 16, 17, 33, 40, 33)]
    with Toy(limits(n_blocks=n_blocks), late=late) as toy:
        alone = [toy.generate(p, GREEDY) for p in prompts]
        streams = [
            start(toy.loop, replace(request(p, GREEDY), prompt_logprobs=i != 4), stream=False)
            for i, p in enumerate(prompts)
        ]
        for i, (prompt, stream, before) in enumerate(zip(prompts, streams, alone, strict=True)):
            result = stream.wait()
            assert result.token_ids == before.token_ids
            assert result.prompt_logprobs == (wanted_of(toy, prompt) if i != 4 else None)
            assert [e.token_id for e in result.logprobs or ()] == list(result.token_ids)
        toy.assert_all_returned()


def test_each_continuation_has_them_before_its_tokens() -> None:
    prompt = list(range(1, 30))
    with Toy() as toy:
        asked: Any = replace(request(prompt, replace(GREEDY, n=2)), prompt_logprobs=True)
        chunks = list(start(toy.loop, asked, stream=True))
        for index in range(2):
            mine = [c for c in chunks if c.index == index]
            assert mine[0].prompt_logprobs == wanted_of(toy, prompt)
            assert [c.prompt_logprobs for c in mine[1:]] == [None] * 6
            assert mine[0].token_id is mine[0].logprob is None


def test_no_token_need_be_drawn() -> None:
    prompt = list(range(1, 20))
    with Toy() as toy:
        none = replace(GREEDY, max_tokens=0)
        result: Result = start(toy.loop, replace(request(prompt, none), prompt_logprobs=True), stream=False).wait()
        assert (result.token_ids, result.logprobs, result.finish_reason) == ((), (), "length")
        assert result.prompt_logprobs == wanted_of(toy, prompt)
        toy.step.bad_tokens = {10}
        result = start(toy.loop, replace(request(prompt, none), prompt_logprobs=True), stream=False).wait()
        assert isinstance(result.failure, Diverged)
        toy.assert_all_returned()
