"""The block that a model brings to predict further tokens guesses, and changes nothing but the number of steps."""

from __future__ import annotations

import pytest

from quarrel.engine import SamplingParams, Service
from tests.engine.toys import VOCABULARY, BlockStep, Toy, limits

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, seed=3, max_tokens=24, ignore_eos=True)
HOST = SamplingParams(temperature=0.7, seed=8, max_tokens=24, ignore_eos=True, presence_penalty=0.01)
PROMPTS = [[3, 1, 4, 1, 5], [9], list(range(1, 40))]


def texts(toy: Toy, params: SamplingParams, prompts: list[list[int]] = PROMPTS, draft: int = 8) -> list[tuple[int, ...]]:
    with toy.paused():
        streams = [toy.start(prompt, params, service=Service(draft=draft)) for prompt in prompts]
    return [stream.wait().token_ids for stream in streams]


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("params", [GREEDY, DRAWN, HOST], ids=["greedy", "drawn", "host"])
def test_a_block_that_knows_is_always_right(params: SamplingParams, late: bool, recurrent: bool) -> None:
    """So each row that it is given is the one in front of its token: in prompts of many pieces, behind drafts, behind
    prefixes that were found, and where the model draws by chance."""
    shape = limits(max_tokens=32, n_states=20)
    with (
        Toy(late=late, recurrent=recurrent) as plain,
        Toy(shape, late=late, recurrent=recurrent, draft=lambda: BlockStep(limits())) as toy,
    ):
        for prompts in (PROMPTS, PROMPTS, [[*p, 7, 7] for p in PROMPTS], [[3, 1], [3, 1], [3, 1]]):
            assert texts(toy, params, prompts) == texts(plain, params, prompts)
        stats = toy.engine.stats
        if params is not HOST:
            assert stats.drafted_right == stats.drafted_tokens > 200
            assert len(toy.step.sizes) < 0.5 * len(plain.step.sizes)
        toy.assert_all_returned()
        assert toy.engine.drafter is not None
        toy.engine.drafter.propose({})
        assert toy.engine.drafter.cache.pool.free == toy.engine.drafter.cache.pool.n_blocks


def test_who_is_preempted_begins_again_and_guesses_again() -> None:
    few = limits(max_tokens=32, n_blocks=22)
    prompts = [[i + 1] * 20 for i in range(4)]
    with Toy() as plain, Toy(few, draft=lambda: BlockStep(limits())) as toy:
        assert texts(toy, DRAWN, prompts) == texts(plain, DRAWN, prompts)
        assert toy.engine.scheduler.preempted
        assert toy.engine.stats.drafted_right == toy.engine.stats.drafted_tokens > 40


def test_a_block_with_little_room_guesses_for_fewer() -> None:
    with Toy() as plain, Toy(limits(max_tokens=32), draft=lambda: BlockStep(limits(n_blocks=9, max_seqs=2))) as toy:
        assert texts(toy, GREEDY) == texts(plain, GREEDY)
        assert toy.engine.stats.drafted_right == toy.engine.stats.drafted_tokens > 0


def test_a_block_that_breaks_costs_nobody_anything() -> None:
    for launch in (1, 3, 9):  # as it reads a prompt, and as it guesses
        block = BlockStep(limits())
        block.failing = lambda number, at=launch: RuntimeError("broken") if number == at else None  # type: ignore[misc]
        with Toy() as plain, Toy(draft=lambda step=block: step) as toy:  # type: ignore[misc]
            assert texts(toy, GREEDY) == texts(plain, GREEDY)
            assert toy.engine.drafter is None
            assert block.closed == 1


def test_ids_that_there_are_not_end_a_draft() -> None:
    block = BlockStep(limits())
    block.forced = VOCABULARY
    with Toy() as plain, Toy(draft=lambda: block) as toy:
        assert texts(toy, GREEDY) == texts(plain, GREEDY)
        assert not toy.engine.stats.drafted_tokens
        assert texts(toy, GREEDY, draft=0) == texts(plain, GREEDY)
