"""Packed texts: a row for each, in order, beside others that run whole; steps overlap; faults end what they hit."""

from __future__ import annotations

import queue
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from quarrel.engine import CacheRules, Deliver, Engine, Packed, Scoring
from quarrel.engine.engine import RECOVERY
from quarrel.engine.packed import Row
from quarrel.errors import OutOfMemory, QuarrelError
from quarrel.ops.contract import Compute
from quarrel.ops.step import ExplainLine, Limits, MemoryPlan, Pending, StepInputs, StepOutputs, Want

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
    room: int = 1 << 30  # a step of more tokens runs out of memory
    soon: bool = False  # when it is launched, and not when its result is waited for

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        inputs.check(self.limits, 1000)
        self.before.append(list(self.landed))
        lengths = np.diff(inputs.query_start)
        assert inputs.kv_len.tolist() == lengths.tolist()
        self.sizes.append(lengths.tolist())
        short = MemoryError("no room") if len(inputs.ids) > self.room else None
        if short is not None and self.soon:
            raise short
        every = np.stack([inputs.ids, inputs.positions, np.repeat(lengths, lengths)], 1).astype(np.float32)
        means = [every[a:b].mean(0) for a, b in zip(inputs.query_start, inputs.query_start[1:])]
        outputs = StepOutputs(mean=np.array(means)) if want == "mean" else StepOutputs(hidden=every[inputs.out_rows])
        return Flying(self.fail or short or outputs, self.landed, len(self.sizes))

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        return self.launch(inputs, want).result()

    def copy_blocks(self, pairs: Any) -> None:
        raise AssertionError

    copy_states = copy_blocks

    def explain(self) -> list[ExplainLine]:
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
        assert start == len(self.got)
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
    """A text alone that runs out of memory cannot be made smaller: nobody waits for a step that never comes."""
    step = EncoderStep(fail=error)
    engine, lost, kept = engine_on(step), Rows(), Rows()
    run(engine, Packed([[1] * TOKENS], "mean", lost))
    assert isinstance(lost.ended.get_nowait(), QuarrelError)
    step.fail = None
    run(engine, Packed([[2] * TOKENS], "mean", kept))
    assert kept.ended.get_nowait() is None


@pytest.mark.parametrize("soon", [False, True])
@pytest.mark.parametrize("row", ["mean", "last"])
def test_where_memory_is_short_fewer_texts_share_a_step(row: Row, soon: bool) -> None:
    """Each text has its row once, in order; one that is too long alone fails, and nobody else does."""
    step = EncoderStep(room=4, soon=soon)
    engine, many, other, lost, last = engine_on(step), Rows(), Rows(), Rows(), Rows()
    texts = [[i] * length for i, length in enumerate((3, 1, 2, 2, 4), 1)]
    run(
        engine,
        Packed(texts, row, many),
        Packed([[7, 7, 7], [8, 8]], row, other),
        Packed([[9] * 5], row, lost),
        Packed([[10]], row, last),
    )
    assert [got[0] for got in many.got] == [1, 2, 3, 4, 5]
    assert [got[0] for got in other.got] == [7, 8]
    assert [got[0] for got in last.got] == [10]
    assert [to.ended.get_nowait() for to in (many, other, last)] == [None] * 3
    failure = lost.ended.get_nowait()
    assert isinstance(failure, OutOfMemory)
    assert not lost.got
    step.room = TOKENS
    for _ in range(RECOVERY * 4):
        run(engine, Packed([[1]], row, Rows()))
    run(engine, Packed([[2] * 6, [3] * 6], row, Rows()))
    assert step.sizes[-1] == [6, 6], "larger steps again after a while"


def test_a_text_longer_than_the_steps_that_are_left_runs_alone() -> None:
    step = EncoderStep(room=4)
    engine, first, every = engine_on(step), Rows(), Rows()
    run(engine, Packed([[1] * 3, [2] * 3], "mean", first))
    step.room = TOKENS
    engine.scheduler.max_tokens = 2
    run(engine, Scoring([4, 5, 6], "hidden", every, whole=True), Packed([[7] * 8, [8]], "mean", texts := Rows()))
    assert [row[0] for row in every.got] == [4, 5, 6]
    assert [row[0] for row in texts.got] == [7, 8]


def test_a_cancelled_one_is_told() -> None:
    engine, rows = engine_on(EncoderStep()), Rows()
    sequence = Packed([[1]], "mean", rows)
    engine.add(sequence)
    engine.cancel(sequence)
    assert "cancelled" in str(rows.ended.get_nowait())


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_each_text_has_its_row_once(seed: int) -> None:
    """Packs and texts in any order; steps that break, are refused or too long; some are cancelled."""
    chance = random.Random(seed)
    step = EncoderStep()
    engine = engine_on(step)
    told: dict[Rows, list[float]] = {}
    running: list[Packed | Scoring] = []
    for i in range(300):
        if chance.random() < 0.5:
            rows, number = Rows(), 1 + i % 900
            texts = [[number + k] * chance.randint(1, 5) for k in range(chance.randint(1, 4))]
            while sum(map(len, texts)) > TOKENS:
                texts.pop()
            if chance.random() < 0.2:
                running.append(Scoring([n for text in texts for n in text], "hidden", rows, whole=True))
                told[rows] = [float(n) for text in texts for n in text]
            else:
                row: Row = chance.choice(["mean", "first", "last"])
                running.append(Packed(texts, row, rows))
                told[rows] = [float(text[0]) for text in texts]
            engine.add(running[-1])
        if running and chance.random() < 0.05:
            engine.cancel(chance.choice(running))
        step.room, step.soon = chance.choice([TOKENS] * 8 + [4, 2]), chance.random() < 0.5
        step.fail = chance.choice([None] * 20 + [QuarrelError("refused"), RuntimeError("device")])
        engine.advance()
    step.room, step.fail = TOKENS, None
    while engine.advance():
        pass
    whole = 0
    for rows, wanted in told.items():
        got = [row[0] for row in rows.got]
        assert got == wanted[: len(got)]
        whole += (rows.ended.get_nowait() is None) and got == wanted
        assert rows.ended.empty()
    assert whole > len(told) // 2
    assert not engine.scheduler.running
    assert not len(engine.scheduler.waiting)
    assert engine.cache.pool.free == engine.cache.pool.n_blocks
