"""A text that diverges spoils rows before the token that it diverges at: whoever shares them gets what he gets alone."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from quarrel.engine import SamplingParams
from quarrel.errors import Diverged
from quarrel.ops.step import StepInputs
from tests.engine.toys import VOCABULARY, Toy, limits

BAD, SPOILT = 40, -7
PREFIX = [5, 6, 7, 8, 9, 10, 11, 12]


def spoil_whole_launches(toy: Toy) -> None:
    """A bad token makes all rows of its sequence's launch no numbers, as a tile of keys does."""
    step, spoilt = toy.step, set[int]()
    run, logits = step._run, step.logits

    def running(inputs: StepInputs, s: int) -> list[int]:
        made = run(inputs, s)
        first, end = int(inputs.query_start[s]), int(inputs.query_start[s + 1])
        size = step.limits.block_size
        read = {int(inputs.block_table[s, i // size]) * size + i % size for i in range(int(inputs.kv_len[s]))}
        written = {int(slot) for slot in inputs.slots[first:end]}
        spoilt.difference_update(written)
        if BAD not in inputs.ids[first:end] and not spoilt & read:
            return made
        spoilt.update(written)
        return [SPOILT] * len(made)

    def numbers(history: int, last: int) -> np.ndarray[Any, Any]:
        return np.full(VOCABULARY, np.nan, np.float32) if history == SPOILT else logits(history, last)

    step._run, step.logits = running, numbers  # type: ignore[method-assign]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(temperature=0, max_tokens=9, logprobs=2),
        SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.2),
    ],
    ids=["device", "logprobs", "host"],
)
def test_a_prefix_of_a_text_that_diverges_is_not_held_against_others(params: SamplingParams, late: bool) -> None:
    sound = [*PREFIX, 3, 4]
    with Toy(limits(n_blocks=80)) as toy:
        alone = toy.generate(sound, params)
        assert alone.finish_reason in ("length", "stop")
    with Toy(limits(n_blocks=80), late=late) as toy:
        spoil_whole_launches(toy)
        begun = threading.Event()
        toy.step.failing = lambda launch: begun.set()  # type: ignore[assignment, return-value]
        release = toy.hold(1)
        bad = toy.start([*PREFIX, BAD, *[13] * 50], params)
        assert begun.wait(60)
        others = [toy.start(sound, params), toy.start([*sound, 2], params)]
        release()
        assert isinstance(bad.wait().failure, Diverged)
        result = others[0].wait()
        assert (result.finish_reason, result.token_ids) == (alone.finish_reason, alone.token_ids)
        assert others[1].wait().finish_reason in ("length", "stop")
        assert toy.engine.stats.known_tokens > 0
        toy.assert_all_returned()


def test_who_diverges_alone_runs_no_more_than_twice() -> None:
    with Toy(limits(n_blocks=80)) as toy:
        spoil_whole_launches(toy)
        params = SamplingParams(temperature=0, max_tokens=2)
        assert toy.generate(PREFIX, params).finish_reason in ("length", "stop")
        before = toy.step.launches
        assert isinstance(toy.generate([*PREFIX, BAD], params).failure, Diverged)
        assert toy.engine.stats.known_tokens == len(PREFIX)
        assert toy.step.launches == before + 2
        toy.assert_all_returned()
