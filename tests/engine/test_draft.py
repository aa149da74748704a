"""A draft model guesses, and changes nothing but the number of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quarrel.engine import SamplingParams, Service
from quarrel.engine.speculate import LONGEST_PAUSE, Pace
from quarrel.errors import RequestError
from tests.engine.toys import VOCABULARY, HistoryStep, Toy, limits

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, seed=3, max_tokens=24, ignore_eos=True)
HOST = SamplingParams(temperature=0.7, seed=8, max_tokens=24, ignore_eos=True, presence_penalty=0.01)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], list(range(1, 40))]


class Unlike(HistoryStep):
    """Agrees with the large model at three of four places."""

    def logits(self, history: int, last: int) -> np.ndarray[Any, Any]:
        return super().logits(history if history % 4 else history + 1, last)


def texts(toy: Toy, params: SamplingParams, service: Service | None = None) -> list[tuple[int, ...]]:
    with toy.paused():
        streams = [toy.start(prompt, params, service=service or Service()) for prompt in PROMPTS]
    return [stream.wait().token_ids for stream in streams]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("params", [GREEDY, DRAWN, HOST], ids=["greedy", "drawn", "host"])
@pytest.mark.parametrize("kind", [HistoryStep, Unlike])
def test_the_tokens_are_those_without_a_draft_model(kind: type[HistoryStep], params: SamplingParams, late: bool) -> None:
    with Toy(late=late) as plain, Toy(limits(max_tokens=32), late=late, draft=lambda: kind(limits(), late=late)) as toy:
        assert texts(toy, params) == texts(plain, params)
        stats = toy.engine.stats
        if kind is Unlike:
            assert 0 < stats.drafted_right < stats.drafted_tokens
        elif params is not HOST:
            assert stats.drafted_right == stats.drafted_tokens > 40
        assert stats.guessed_tokens == stats.drafted_tokens
        assert len(toy.step.sizes) < len(plain.step.sizes)
        toy.assert_all_returned()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("params", [GREEDY, DRAWN, HOST], ids=["greedy", "drawn", "host"])
@pytest.mark.parametrize("kind", [HistoryStep, Unlike])
def test_a_recurrent_state_is_taken_back_to_where_a_draft_was_wrong(
    kind: type[HistoryStep], params: SamplingParams, late: bool
) -> None:
    """The toy sees that each state is that of its sequence's past. Prefixes are found again."""
    shape = limits(max_tokens=32, n_states=20)
    with (
        Toy(recurrent=True, late=late) as plain,
        Toy(shape, late=late, recurrent=True, draft=lambda: kind(limits())) as toy,
    ):
        for _ in range(2):
            assert texts(toy, params) == texts(plain, params)
            assert texts(toy, params, Service(speculate=4)) == texts(plain, params)
        stats = toy.engine.stats
        assert stats.drafted_tokens
        if kind is Unlike:
            assert 0 < stats.drafted_right < stats.drafted_tokens
        toy.assert_all_returned()


def test_a_request_says_how_far_ahead_is_guessed() -> None:
    with Toy(limits(max_tokens=32), draft=lambda: HistoryStep(limits())) as toy:
        texts(toy, GREEDY, Service(draft=0))
        assert not toy.engine.stats.drafted_tokens
        texts(toy, GREEDY, Service(draft=2))
        assert max(tokens for tokens, seqs in toy.step.sizes if seqs == 1) <= 32
        assert toy.engine.stats.drafted_tokens
    for wrong in (-1, 17, True, 1.5):
        with pytest.raises(RequestError, match="draft is .* from 0 to 16"):
            Service(draft=wrong)  # type: ignore[arg-type]


def test_a_draft_model_with_too_few_blocks_guesses_for_fewer() -> None:
    with Toy() as plain, Toy(limits(max_tokens=32), draft=lambda: HistoryStep(limits(n_blocks=4))) as toy:
        assert texts(toy, GREEDY) == texts(plain, GREEDY)
        assert toy.engine.stats.drafted_tokens


def test_a_draft_model_that_breaks_costs_nobody_anything() -> None:
    draft = HistoryStep(limits())
    draft.failing = lambda launch: RuntimeError("broken") if launch == 7 else None
    with Toy() as plain, Toy(draft=lambda: draft) as toy:
        assert texts(toy, GREEDY) == texts(plain, GREEDY)
        assert toy.engine.drafter is None
        assert draft.closed == 1


def test_a_fault_of_the_large_model_makes_the_draft_model_anew() -> None:
    made: list[HistoryStep] = []
    with Toy(draft=lambda: made.append(HistoryStep(limits())) or made[-1]) as toy:  # type: ignore[func-returns-value]
        toy.step.failing = lambda launch: RuntimeError("broken") if launch == 3 else None
        texts(toy, GREEDY)
        assert toy.engine.stats.restarts == 1
        assert [step.closed for step in made] == [1, 0]
        assert toy.engine.stats.drafted_tokens


def test_ids_that_one_of_the_models_does_not_have_are_not_guessed_at() -> None:
    draft = HistoryStep(limits())
    draft.forced = VOCABULARY
    with Toy() as plain, Toy(draft=lambda: draft) as toy:
        assert texts(toy, GREEDY) == texts(plain, GREEDY)
        assert not toy.engine.stats.drafted_tokens


def test_guesses_reach_further_while_they_are_right() -> None:
    pace = Pace(8)
    asked = []
    for right in (4, 8, 8, 2, 0):
        asked.append(pace.ahead())
        pace.observe(asked[-1], right)
    assert asked == [4, 8, 8, 8, 3]
    pauses = []
    for _ in range(6):
        waited = 0
        while not (count := pace.ahead()):
            waited += 1
        pauses.append(waited)
        pace.observe(count, 0)
    assert pauses == [1, 2, 4, 8, 8, 8]
    assert LONGEST_PAUSE == 8
