"""Under any order of arrivals, cancellations and steps: no block is owned twice or lost, nobody starves, and each
sequence reads its own past from the cache."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quarrel.engine.inputs import step_inputs
from quarrel.engine.results import FinishReason
from quarrel.engine.scheduler import Scheduler
from quarrel.engine.sequence import Sequence
from quarrel.ops.step import Limits, StepOutputs, Want
from tests.engine.toys import HistoryStep

N_CTX, BLOCK = 12, 4


class Run(Sequence):
    """Goes on for `more` tokens, each a function of the last; draws nothing, so any step will do."""

    keeps_prefix = True

    def __init__(self, tokens: list[int], more: int, want: Want, every_row: bool, family: object) -> None:
        super().__init__(tokens, len(tokens) + max(0, more - 1), family)
        self.left, self.want, self.every_row = more, want, every_row
        self.keeps_prefix = not every_row
        self.rows = 0

    def settle(self, outputs: StepOutputs, first: int, count: int) -> None:
        raise AssertionError("the machine settles")

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        raise AssertionError("the machine ends")

    def advance(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self.over = True
        else:
            self.tokens.append((self.tokens[-1] * 3 + 1) % 5)


class Machine(RuleBasedStateMachine):
    @initialize(
        max_seqs=st.integers(1, 4),
        more_tokens=st.integers(0, 8),
        spare=st.sampled_from([0, 0, 1, 2, 9]),
        reuse=st.sampled_from([True, True, False]),
    )
    def make(self, max_seqs: int, more_tokens: int, spare: int, reuse: bool) -> None:
        blocks = N_CTX // BLOCK
        self.limits = Limits(max_seqs + more_tokens, max_seqs, blocks, blocks + spare, BLOCK)
        self.step = HistoryStep(self.limits)
        self.scheduler = Scheduler(self.limits, self.step.copy_blocks, max_rows=3, reuse=reuse)
        self.alive: list[Run] = []
        self.arrived: list[Run] = []

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=N_CTX),
        more=st.integers(0, 8),
        want=st.sampled_from(["tokens", "logits"]),
        copies=st.integers(1, 3),
    )
    def arrive(self, prompt: list[int], more: int, want: Want, copies: int) -> None:
        more = min(more, N_CTX - len(prompt) + 1)
        family = object()
        for _ in range(copies):
            self._add(Run(prompt, more, want, False, family))

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=N_CTX))
    def arrive_for_scoring(self, prompt: list[int]) -> None:
        self._add(Run(prompt, 0, "hidden", True, None))

    @precondition(lambda self: self.arrived)
    @rule(data=st.data(), by=st.sampled_from([1, 3, N_CTX]), more=st.integers(0, 3))
    def go_on_with_a_conversation(self, data: st.DataObject, by: int, more: int) -> None:
        past = data.draw(st.sampled_from(self.arrived)).tokens
        prompt = [*past, *[1] * min(by, N_CTX - len(past))]
        self._add(Run(prompt, min(more, N_CTX - len(prompt) + 1), "tokens", False, None))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._leave(data.draw(st.sampled_from(self.alive)))

    @rule()
    def run_a_step(self) -> None:
        assert self._step() or not self.alive

    @rule()
    def run_dry(self) -> None:
        """Whatever has arrived ends within as many steps as there are tokens to run: nobody waits for ever."""
        steps = sum(run.pending + max(run.left, 0) for run in self.alive) + 1
        for _ in range(steps):
            if not self._step():
                break
        assert not self.alive

    @invariant()
    def blocks_are_owned_as_counted(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler, pool = self.scheduler, self.scheduler.pool
        owners = Counter(b for run in scheduler.running for b in run.blocks)
        owners.update(b for entry in scheduler.prefixes.entries() for b in entry.blocks)
        assert {b: pool.holders(b) for b in range(pool.n_blocks)} == {b: owners[b] for b in range(pool.n_blocks)}
        assert pool.free == pool.n_blocks - len(owners)
        for run in scheduler.running:
            assert len(set(run.blocks)) == len(run.blocks) == -(-run.length // BLOCK)
            written_from_now_on = run.blocks[run.computed // BLOCK :]
            assert all(owners[b] == 1 for b in written_from_now_on)
        assert all(not run.blocks for run in scheduler.waiting)
        assert len(scheduler.running) <= self.limits.max_seqs
        assert {id(r) for r in (*scheduler.running, *scheduler.waiting)} == {id(r) for r in self.alive}

    @invariant()
    def those_who_wait_wait_in_order(self) -> None:
        if hasattr(self, "scheduler"):
            waiting = [self.arrived.index(run) for run in self.scheduler.waiting if isinstance(run, Run)]
            assert waiting == sorted(waiting)

    def _add(self, run: Run) -> None:
        self.scheduler.add(run)
        self.alive.append(run)
        self.arrived.append(run)

    def _leave(self, run: Run) -> None:
        self.scheduler.remove(run)
        self.alive.remove(run)

    def _step(self) -> bool:
        batch = self.scheduler.next()
        if batch is None:
            return False
        assert batch.parts
        assert sum(p.count for p in batch.parts) <= self.limits.max_tokens
        assert sum(p.rows for p in batch.parts) <= max(3, self.limits.max_seqs)
        # The history step checks every slot that each sequence reads.
        self.step(step_inputs(batch, self.limits), "hidden")
        for part in batch.parts:
            run = part.sequence
            assert isinstance(run, Run)
            assert run.want == batch.want
            assert part.start == run.computed
            run.computed += part.count
            run.rows += part.rows
            if run.every_row:
                assert part.rows == part.count
                run.over = run.rows == len(run.tokens)
            elif part.rows:
                assert run.pending == 0
                run.advance()
            if run.over:
                self._leave(run)
        return True


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = Machine.TestCase


def scheduler(max_tokens: int = 8, max_seqs: int = 3, n_blocks: int = 20, n_ctx: int = 24) -> tuple[Scheduler, HistoryStep]:
    step = HistoryStep(Limits(max_tokens, max_seqs, n_ctx // BLOCK, n_blocks, BLOCK))
    return Scheduler(step.limits, step.copy_blocks, max_rows=100), step


def advance(s: Scheduler, step: HistoryStep) -> list[tuple[int, int]]:
    """One step; (tokens, rows) of each part."""
    batch = s.next()
    assert batch is not None
    step(step_inputs(batch, s.limits), "hidden")
    for part in batch.parts:
        part.sequence.computed += part.count
        if part.rows and isinstance(part.sequence, Run):
            part.sequence.advance()
    return [(p.count, p.rows) for p in batch.parts]


def run(tokens: list[int], more: int = 9, want: Want = "tokens", family: object = None) -> Run:
    return Run(tokens, more, want, False, family)


def test_a_long_prompt_runs_in_pieces_beside_those_who_decode() -> None:
    s, step = scheduler()
    s.add(run([1, 2]))
    assert advance(s, step) == [(2, 1)]
    s.add(run(list(range(15)), 2))
    assert advance(s, step) == [(1, 1), (7, 0)]
    assert advance(s, step) == [(1, 1), (7, 0)]
    assert advance(s, step) == [(1, 1), (1, 1)]


def test_kinds_of_result_take_turns() -> None:
    s, _ = scheduler()
    for want in ("tokens", "logits", "hidden"):
        s.add(run([1, 2, 3], want=want))  # type: ignore[arg-type]
    seen = []
    for _ in range(6):
        batch = s.next()
        assert batch is not None
        seen.append(batch.want)
        for part in batch.parts:
            part.sequence.computed += part.count
            part.sequence.advance()  # type: ignore[attr-defined]
    assert seen == ["hidden", "logits", "tokens"] * 2


def test_the_first_in_line_is_not_passed_over_for_want_of_blocks() -> None:
    s, step = scheduler(n_blocks=6)
    big, small = run(list(range(20)), 5), run([9])
    s.add(run([1, 2, 3]))  # takes three of six blocks
    s.add(big)
    s.add(small)
    advance(s, step)
    assert list(s.waiting) == [big, small]
    s.remove(s.running[0])
    advance(s, step)
    assert s.running == [big]


def test_siblings_wait_for_one_prefill_and_share_it() -> None:
    s, step = scheduler(max_tokens=4)
    family = object()
    brothers = [run([1, 2, 3, 4, 5, 6], family=family) for _ in range(3)]
    for brother in brothers:
        s.add(brother)
    other = run([7])
    s.add(other)
    assert advance(s, step) == [(1, 1), (3, 0)]  # the stranger is let past those who wait for their brother
    assert s.running == [brothers[0], other]
    assert advance(s, step) == [(1, 1), (3, 1)]
    advance(s, step)
    assert brothers[1].reused == 5
    assert brothers[1].blocks[0] == brothers[0].blocks[0]
    assert brothers[1].blocks[1] != brothers[0].blocks[1]


def test_a_prefix_is_reused_where_the_cache_has_no_block_to_spare() -> None:
    s, step = scheduler(n_blocks=6)
    first = run([1] * 10, 1)
    s.add(first)
    advance(s, step)
    advance(s, step)
    s.remove(first)
    second = run([1] * 10 + [2] * 14, 1)
    s.add(second)
    advance(s, step)
    assert second.reused == 8  # whole blocks only: copying the third would take one block more than there is
    advance(s, step)


def test_what_can_never_fit_is_a_fault() -> None:
    s, _ = scheduler()
    with pytest.raises(AssertionError):
        s.add(run([1] * 25))
