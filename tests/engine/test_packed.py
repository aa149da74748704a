"""Packed texts: a row for each, in order, beside others that run whole; steps overlap; faults end what they hit."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from quarrel.engine import CacheRules, Deliver, Engine, Packed, Scoring
from quarrel.errors import QuarrelError
from quarrel.ops.contract import Compute
from quarrel.ops.step import Limits, MemoryPlan, Pending, StepInputs, StepOutputs, Taken, Want

TOKENS = 12


@dataclass
class Flying:
    outputs: StepOutputs | Exception
    landed: list[int]
    number: int

    def result(self) -> StepOutputs:
        self.landed.append(self.number)
        if isinstance(self.outputs, Exception):
            raise self.outputs
        return self.outputs


@dataclass
class EncoderStep:
    """A row is (id, its position, tokens of its text); a mean the mean of those. Launches return before they are over."""

    limits: Limits = Limits(TOKENS, TOKENS, 1, TOKENS, TOKENS)  # noqa: RUF009 (frozen)
    compute: Compute = "float32"
    landed: list[int] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)  # what had landed at each launch
    sizes: list[list[int]] = field(default_factory=list)
    fail: Exception | None = None

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        inputs.check(self.limits, 1000)
        self.before.append(list(self.landed))
        lengths = np.diff(inputs.query_start)
        assert inputs.kv_len.tolist() == lengths.tolist()
        self.sizes.append(lengths.tolist())
        every = np.stack([inputs.ids, inputs.positions, np.repeat(lengths, lengths)], 1).astype(np.float32)
        means = [every[a:b].mean(0) for a, b in zip(inputs.query_start, inputs.query_start[1:])]
        outputs = StepOutputs(mean=np.array(means)) if want == "mean" else StepOutputs(hidden=every[inputs.out_rows])
        return Flying(self.fail or outputs, self.landed, len(self.sizes))

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        return self.launch(inputs, want).result()

    def copy_blocks(self, pairs: Any) -> None:
        raise AssertionError

    copy_states = copy_blocks

    def explain(self) -> list[Taken]:
        return []

    def memory(self) -> MemoryPlan:
        return MemoryPlan(0, 0, 0, 0)

    def close(self) -> None:
        pass


class Rows(Deliver):
    def __init__(self) -> None:
        self.got: list[list[float]] = []
        self.ended: queue.SimpleQueue[QuarrelError | None] = queue.SimpleQueue()

    def rows(self, start: int, rows: Any) -> None:
        self.got += rows.tolist()

    def end(self, failure: QuarrelError | None) -> None:
        self.ended.put(failure)


def engine_on(step: EncoderStep) -> Engine:
    return Engine(lambda: step, 3, CacheRules(reuse=False))


def run(engine: Engine, *sequences: Packed | Scoring) -> None:
    for sequence in sequences:
        engine.add(sequence)
    while engine.advance():
        pass
    cache = engine.cache
    assert cache.pool.free == cache.pool.n_blocks


def test_each_text_has_its_row() -> None:
    texts = [[5, 6, 7], [8], [9, 10]]
    rows = [Rows() for _ in range(3)]
    step = EncoderStep()
    run(engine_on(step), *(Packed(texts, row, to) for row, to in zip(("mean", "first", "last"), rows)))  # type: ignore[arg-type]
    assert rows[0].got == [[6, 1, 3], [8, 0, 1], [9.5, 0.5, 2]]
    assert rows[1].got == [[5, 0, 3], [8, 0, 1], [9, 0, 2]]
    assert rows[2].got == [[7, 2, 3], [8, 0, 1], [10, 1, 2]]
    assert [to.ended.get_nowait() for to in rows] == [None] * 3
    assert sorted(step.sizes) == [[3, 1, 2], [3, 1, 2, 3, 1, 2]], "one step for the means, one for the other rows"


def test_whole_texts_whose_every_row_is_wanted_share_the_step() -> None:
    packed, every = Rows(), Rows()
    step = EncoderStep()
    run(engine_on(step), Packed([[1, 2], [3]], "last", packed), Scoring([4, 5, 6], "hidden", every, whole=True))
    assert step.sizes == [[2, 1, 3]]
    assert packed.got == [[2, 1, 2], [3, 0, 1]]
    assert every.got == [[4, 0, 3], [5, 1, 3], [6, 2, 3]]


def test_a_step_is_launched_while_the_one_before_runs() -> None:
    rows = [Rows() for _ in range(4)]
    step = EncoderStep()
    run(engine_on(step), *(Packed([[i] * TOKENS], "mean", to) for i, to in enumerate(rows)))
    assert step.before == [[], [], [1], [1, 2]]
    assert [to.got[0][0] for to in rows] == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [MemoryError("no room"), QuarrelError("refused")])
def test_what_fails_is_told_and_the_others_run(error: Exception) -> None:
    """Full steps that run out of memory cannot be made smaller: nobody waits for one that never comes."""
    step = EncoderStep(fail=error)
    engine, lost, kept = engine_on(step), Rows(), Rows()
    run(engine, Packed([[1] * TOKENS], "mean", lost))
    assert isinstance(lost.ended.get_nowait(), QuarrelError)
    step.fail = None
    run(engine, Packed([[2] * TOKENS], "mean", kept))
    assert kept.ended.get_nowait() is None


def test_a_cancelled_one_is_told() -> None:
    engine, rows = engine_on(EncoderStep()), Rows()
    sequence = Packed([[1]], "mean", rows)
    engine.add(sequence)
    engine.cancel(sequence)
    assert "cancelled" in str(rows.ended.get_nowait())
