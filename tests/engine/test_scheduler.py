"""Who runs when: pieces of prompts beside those who decode, ranks and their patience, who is put out and comes back."""

from __future__ import annotations

import pytest

from quarrel.engine.cache import Cache, CacheRules
from quarrel.engine.inputs import Inputs
from quarrel.engine.queue import WaitingQueue
from quarrel.engine.results import FinishReason
from quarrel.engine.scheduler import DRAIN, PATIENCE, Scheduler
from quarrel.engine.sequence import Sequence
from quarrel.errors import QuarrelError
from quarrel.ops.step import Limits, StepOutputs, Want
from tests.engine.toys import HistoryStep

BLOCK = 4


class Run(Sequence):
    """Goes on for `more` tokens, each a function of the last; draws nothing, so any step will do."""

    keeps_prefix = True

    def __init__(
        self, tokens: list[int], more: int = 9, want: Want = "tokens", family: object = None, siblings: int = 1
    ) -> None:
        super().__init__(tokens, len(tokens) + max(0, more - 1), family, siblings)
        self.left, self.want = more, want

    def accept(self, outputs: StepOutputs, first: int, count: int, draft: object) -> int:
        raise AssertionError("the table settles")

    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None:
        raise AssertionError("the table ends")

    def advance(self) -> None:
        self.left -= 1
        if self.left > 0:
            self.tokens.append((self.tokens[-1] * 3 + 1) % 5)
        self.finished = self.left <= 0


class Scored(Run):
    every_row = True

    def rows(self, end: int) -> int:
        return end - self.computed


class Table:
    """A scheduler, the step that it feeds, and a clock to be moved by hand."""

    def __init__(
        self,
        max_tokens: int = 8,
        max_seqs: int = 3,
        n_blocks: int = 20,
        n_ctx: int = 24,
        max_rows: int = 100,
        beside: int | None = None,
    ) -> None:
        limits = Limits(max_tokens, max_seqs, n_ctx // BLOCK, n_blocks, BLOCK)
        self.step, self.now = HistoryStep(limits), 0.0
        self.cache = Cache(limits, self.step.copy_blocks, self.step.copy_states, CacheRules())
        self.scheduler = Scheduler(limits, self.cache, max_rows=max_rows, clock=lambda: self.now, beside=beside)
        self.inputs = Inputs(limits, self.cache)

    def add(self, *runs: Run) -> None:
        for run in runs:
            self.scheduler.add(run)

    def advance(self) -> list[tuple[int, int]]:
        """One step; (tokens, rows) of each part."""
        batch = self.scheduler.next()
        assert batch is not None
        self.step(self.inputs.of(batch), "hidden")
        for part in batch.parts:
            run = part.sequence
            assert isinstance(run, Run)
            assert run.computed == part.start
            run.computed += part.count
            self.cache.commit(run)
            if part.rows:
                run.advance()
            if run.finished:
                self.scheduler.remove(run)
        return [(p.count, p.rows) for p in batch.parts]


def test_a_long_prompt_runs_in_pieces_beside_those_who_decode() -> None:
    table = Table()
    table.add(Run([1, 2]))
    assert table.advance() == [(2, 1)]
    table.add(Run(list(range(15)), 2))
    assert [table.advance() for _ in range(3)] == [[(1, 1), (7, 0)], [(1, 1), (7, 0)], [(1, 1), (1, 1)]]


def test_prompts_take_no_more_than_they_may_beside_those_who_decode() -> None:
    table = Table(beside=3)
    table.add(Run(list(range(12)), 3))
    assert [table.advance() for _ in range(2)] == [[(8, 0)], [(4, 1)]]  # alone as much as fits
    table.add(Run([4, 3, 2, 1, 0], 1), Run([3, 3, 3], 1))
    assert [table.advance() for _ in range(2)] == [[(1, 1), (3, 0)], [(1, 1), (2, 1), (1, 0)]]
    assert table.advance() == [(2, 1)]


def test_drawn_on_the_host_and_on_the_device_share_a_step() -> None:
    table = Table()
    table.add(Run([1]), Run([2], want="logits"))
    batch = table.scheduler.next()
    assert batch is not None
    assert (batch.want, len(batch.parts), batch.waits) == ("both", 2, True)
    table.add(Run([3], want="logprobs"))
    batch = table.scheduler.next()
    assert batch is not None
    assert (batch.want, len(batch.parts), batch.waits) == ("all", 3, True)


def test_log_probabilities_are_no_reason_to_wait() -> None:
    table = Table()
    table.add(Run([1]), Run([2], want="logprobs"))
    batch = table.scheduler.next()
    assert batch is not None
    assert (batch.want, len(batch.parts), batch.waits) == ("logprobs", 2, False)


def test_rows_of_every_position_take_turns_with_what_is_drawn() -> None:
    table = Table(max_rows=2)
    table.add(Run([1, 2, 3]), Scored([1, 2, 3], want="hidden"), Scored([4, 5], want="logits"))
    seen = []
    for _ in range(6):
        batch = table.scheduler.next()
        assert batch is not None
        seen.append(batch.want)
    assert seen == ["tokens", "hidden", "logits"] * 2


def test_the_first_in_line_is_not_passed_over_for_want_of_blocks() -> None:
    table = Table(n_blocks=6)
    first, big, small = Run(list(range(12))), Run(list(range(20)), 5), Run([9])
    table.add(first, big, small)
    table.advance()
    assert table.scheduler.running == [first]
    assert list(table.scheduler.waiting) == [big, small]
    table.scheduler.remove(first)
    table.advance()
    assert table.scheduler.running == [big]


def test_interactive_goes_before_batch_unless_that_has_waited_long() -> None:
    table = Table(max_seqs=1, max_tokens=8)
    running, batch, later, last = (Run([i], 2) for i in range(4))
    batch.rank = 1
    table.add(running, batch)
    table.advance()
    table.add(later)
    table.advance()  # the first one's end
    table.advance()
    assert table.scheduler.running == [later]
    table.now = PATIENCE + 1.0
    table.add(last)
    table.advance()
    table.advance()
    assert table.scheduler.running == [batch]


def test_one_who_is_interactive_takes_the_place_of_a_batch() -> None:
    table = Table(max_seqs=2, max_tokens=8)
    old, young = Run([1, 2, 3, 4, 5], 9), Run([6, 7], 9)
    old.rank = young.rank = 1
    table.add(old, young)
    table.advance()
    urgent = Run([9], 9)
    table.add(urgent)
    assert table.scheduler.next(drained=False) is DRAIN  # not while a step with it is on its way
    table.advance()
    assert table.scheduler.running == [urgent, old]
    assert list(table.scheduler.waiting) == [young]
    assert not young.cache.blocks
    table.scheduler.remove(urgent)
    table.advance()
    assert (young.slot >= 0, table.cache.hits) == (True, 2)  # of its three tokens, two had run


def test_without_blocks_the_youngest_goes_and_comes_back_with_what_it_had() -> None:
    table = Table(n_blocks=6, max_seqs=2)
    old, young = Run([1, 2, 3, 4, 5, 6, 7], 17), Run([8, 9, 8, 9, 8, 9], 17)
    table.add(old, young)
    table.advance()
    while young.slot >= 0:
        table.advance()
        assert len(old.tokens) < 24
    assert old.slot >= 0
    assert table.scheduler.preempted == 1
    had = list(young.tokens)
    while not old.finished:
        table.advance()
    while not young.finished:
        table.advance()
    assert young.tokens[: len(had)] == had
    assert len(young.tokens) == 6 + 16


def test_siblings_wait_for_one_prefill_and_share_it() -> None:
    table = Table(max_tokens=4)
    family = object()
    brothers = [Run([1, 2, 3, 4, 5, 6], family=family, siblings=3) for _ in range(3)]
    other = Run([7])
    table.add(*brothers, other)
    assert table.advance() == [(1, 1), (3, 0)]  # the stranger is let past those who wait for their brother
    assert table.scheduler.running == [brothers[0], other]
    assert table.advance() == [(1, 1), (3, 1)]
    table.advance()
    assert brothers[1].cache.blocks[0] == brothers[0].cache.blocks[0]
    assert brothers[1].cache.blocks[1] != brothers[0].cache.blocks[1]
    assert table.cache.hits == 5


def test_a_sibling_waits_for_the_last_two_tokens_of_the_prompt_too() -> None:
    table, family = Table(), object()
    first, second = (Run([1, 2], family=family, siblings=2) for _ in range(2))
    table.add(first, second)
    assert table.advance() == [(2, 1)]
    assert list(table.scheduler.waiting) == [second]
    assert table.advance() == [(1, 1), (1, 1)]
    assert table.cache.hits == 1


def test_a_prefix_is_reused_where_the_cache_has_no_block_to_spare() -> None:
    table = Table(n_blocks=6)
    table.add(Run([1] * 10, 1))
    table.advance()
    table.advance()
    second = Run([1] * 10 + [2] * 14, 1)
    table.add(second)
    table.advance()
    assert table.cache.hits == 8  # whole blocks only: copying the third would take one block more than there is
    while not second.finished:
        table.advance()


def test_a_queue_that_many_have_left_keeps_the_others_in_order() -> None:
    """Beyond 64 entries of those who are gone it is made anew."""
    queue, runs = WaitingQueue(), [Run([1]) for _ in range(200)]
    for i, run in enumerate(runs):
        run.order = 37 * i % 200
        queue.push(run)
    for run in runs[:150]:
        queue.remove(run)
    wanted = sorted(runs[150:], key=lambda run: run.place)
    assert [*queue] == wanted
    assert [queue.pop() for _ in range(51)] == [*wanted, None]
    assert len(queue) == 0


def test_what_can_never_fit_is_a_fault() -> None:
    with pytest.raises(AssertionError):
        Table().add(Run([1] * 25))


def test_a_known_text_that_waits_for_blocks_is_looked_up_once() -> None:
    table, hashed = Table(n_blocks=9), 0
    digest = table.cache.prefixes._digest

    def counted(before: bytes, tokens: bytes) -> bytes:
        nonlocal hashed
        hashed += 1
        return digest(before, tokens)

    table.add(Run([1, 2, 3, 4] * 4, 1))
    while table.scheduler.running or table.scheduler.waiting:
        table.advance()
    table.add(Run([9], 20), Run([8], 20))
    table.advance()
    waits = Run([1, 2, 3, 4] * 5 + [7] * 4, 1)
    table.cache.prefixes._digest = counted
    table.add(waits)
    for _ in range(3):
        table.advance()
    assert waits.slot < 0
    assert hashed <= 8  # five of its own, and one for each block that the others fill
    while not waits.finished:
        table.advance()
    assert table.cache.pool.free + table.cache.prefixes.kept == 9
