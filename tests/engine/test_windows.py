"""Groups of layers with a window take blocks of their own, as many as it touches; a text goes on where they still are."""

from __future__ import annotations

import random

from quarrel.engine.cache import Cache, CacheRules
from quarrel.engine.inputs import Inputs
from quarrel.engine.scheduler import Scheduler
from quarrel.ops.step import Limits
from tests.engine.simulation import NullStep
from tests.engine.test_scheduler import BLOCK, Run, Table

GROUPS, WINDOW = 2, 8
SPAN = 3
"""Blocks of four tokens that eight in a row touch at most."""
TEXT = [1, 2, 3, 4, 0] * 12


class Windows(Table):
    """On a step that looks at what each group has in the cache."""

    def __init__(self, n_blocks: int = 60, max_tokens: int = 8, max_seqs: int = 3) -> None:
        limits = Limits(max_tokens, max_seqs, 16, n_blocks, BLOCK, window_groups=GROUPS)
        step = NullStep(limits, random.Random(0), late=False, recurrent=False, window=WINDOW, faults=0.0)
        self.step, self.now = step, 0.0  # type: ignore[assignment]
        rules = CacheRules(window=WINDOW, window_groups=GROUPS)
        self.cache = Cache(limits, step.copy_blocks, step.copy_states, rules)
        self.scheduler = Scheduler(limits, self.cache, max_rows=100, clock=lambda: self.now)
        self.inputs = Inputs(limits, self.cache)

    def finish(self, run: Run) -> int:
        """Runs it alone; how many tokens were there already."""
        self.add(run)
        self.scheduler.next()
        known = run.computed
        while not run.finished:
            self.advance()
        return known


def held(run: Run) -> int:
    return sum(map(len, run.cache.window_blocks))


def test_a_sequence_holds_blocks_for_its_window_and_for_what_it_runs() -> None:
    table, run = Windows(), Run(TEXT[:40], 15)
    table.add(run)
    while not run.finished:
        table.scheduler.next()
        assert held(run) <= GROUPS * (SPAN + 2)  # two for a piece of eight tokens
        table.advance()
        assert run.finished or (held(run) <= GROUPS * SPAN and len(run.cache.blocks) >= run.computed // BLOCK)


def test_a_text_goes_on_where_its_window_still_is() -> None:
    table = Windows()
    assert table.finish(Run(TEXT[:40], 1)) == 0
    assert table.finish(Run([*TEXT[:30], 7, 7], 1)) == 30
    # The windows go first; the blocks of the others stay.
    whole = len(table.cache.prefixes)
    for node in list(table.cache.prefixes._windows)[2:]:
        table.cache.prefixes._drop_windows(node)
    assert len(table.cache.prefixes) == whole
    assert table.finish(Run([*TEXT[:39], 8], 1)) == 8
    assert table.finish(Run([*TEXT[:39], 9], 1)) == 39  # what ran again has them again


def test_without_room_windows_go_before_texts_and_a_piece_is_as_long_as_they_allow() -> None:
    """A pool that a text just fits into, while another's is kept."""
    blocks = 60 // BLOCK + GROUPS * SPAN
    table = Windows(n_blocks=blocks, max_tokens=32)
    assert table.cache.fits(60)
    table.finish(Run([4] * 16, 1))
    run = Run(TEXT[:56], 5)
    table.add(run)
    pieces = []
    while not run.finished:
        pieces.append(table.advance()[0][0])
    assert pieces[0] < 32
    assert sum(pieces) == 60
    assert table.scheduler.preempted == 0


def test_those_who_find_no_blocks_for_their_windows_are_preempted_and_come_back() -> None:
    table = Windows(n_blocks=60 // BLOCK + GROUPS * SPAN, max_tokens=8, max_seqs=3)
    runs = [Run([i, *TEXT[:11]], 40) for i in range(3)]
    table.add(*runs)
    while not all(run.finished for run in runs):
        table.advance()
    assert table.scheduler.preempted > 0
    assert all(not run.cache.blocks and not run.cache.window_blocks for run in runs)
    table.cache.prefixes.clear()
    assert table.cache.pool.free == table.cache.pool.n_blocks


def test_continuations_of_one_prompt_share_its_window() -> None:
    table, family = Windows(), object()
    runs = [Run(TEXT[:30], 6, family=family, siblings=2) for _ in range(2)]
    table.add(*runs)
    while not runs[1].computed:
        table.advance()
    assert runs[1].computed >= 29
    shared = set(runs[0].cache.window_blocks) & set(runs[1].cache.window_blocks) - {()}
    assert shared
    while not runs[1].finished:
        table.advance()
