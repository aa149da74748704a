"""What the cache keeps, and what the next one starts from: copies of state, blocks behind a window, room for others."""

from __future__ import annotations

import pytest

from quarrel.engine import cache as module
from quarrel.engine.cache import Cache, CacheRules
from quarrel.engine.queue import WaitingQueue
from quarrel.engine.results import FinishReason
from quarrel.engine.sequence import Sequence
from quarrel.errors import QuarrelError
from quarrel.ops.step import Limits
from tests.engine.test_blocks import Store


class Text(Sequence):
    keeps_prefix = True

    def accept(self, outputs: object, first: int, count: int, draft: object) -> int:
        return 0

    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None: ...


class Books:
    """A cache of blocks of four tokens, and the copies of state that it has asked for."""

    def __init__(self, n_blocks: int = 32, **rules: bool | int) -> None:
        self.copies: list[tuple[int, int]] = []
        limits = Limits(64, 4, 8, n_blocks, 4, n_states=12, window_groups=int(rules.get("window_groups", 0)))
        self.cache = Cache(limits, lambda pairs: None, self.copies.extend, CacheRules(**rules))  # type: ignore[arg-type]

    def starts(self, tokens: list[int], slot: int, *family: Sequence, siblings: int = 1) -> Text:
        text = Text(tokens, 30, siblings=siblings)
        assert self.cache.allocate(text, slot, family, 0)
        return text

    def runs(self, text: Text, to: int) -> list[tuple[int, int]]:
        """The copies that this brings about."""
        self.copies.clear()
        text.computed = to
        self.cache.commit(text)
        return self.copies.copy()


TEN = list(range(1, 11))


def test_the_next_one_goes_on_from_the_last_state_that_both_have_seen() -> None:
    books = Books(recurrent=True)
    first = books.starts(TEN, 0)
    assert [books.runs(first, n) for n in (4, 10)] == [[], [(0, 4)]]  # at the end of the prompt
    first.tokens += [11, 12, 13]
    assert books.cache.append(first, 13)
    assert books.runs(first, 13) == []
    books.cache.free(first)
    assert books.copies == [(0, 5)]  # and of the text
    assert len(books.cache.snapshots) == 2
    for tokens, known, copies in (
        ([*TEN, 11, 12, 13, 14], 13, [(5, 1)]),
        ([*TEN, 11, 12, 99], 10, [(4, 1)]),
        ([*TEN, 99], 10, [(4, 1)]),
        ([*TEN[:9], 99, 98], 0, []),
    ):
        books.copies.clear()
        text = books.starts(tokens, 1)
        assert (text.computed, books.copies) == (known, copies)
        text.keeps_prefix = False
        books.cache.free(text)
    assert (books.cache.hits, books.cache.misses) == (33, 10 + 1 + 3 + 1 + 11)


def test_continuations_share_the_state_before_the_last_token_of_their_prompt() -> None:
    books = Books(recurrent=True)
    first = books.starts(TEN, 0, siblings=2)
    assert books.cache.snapshot_end(first, 10) == 9
    assert books.runs(first, 9) == [(0, 4)]
    assert books.cache.snapshot_end(first, 10) == 10
    assert books.runs(first, 10) == [(0, 5)]
    books.copies.clear()
    second = books.starts(TEN, 1, first, siblings=2)
    assert (second.computed, books.copies) == (9, [(4, 1)])
    alone = Books(recurrent=True)
    only = alone.starts(TEN, 0)
    assert alone.cache.snapshot_end(only, 10) == 10
    assert alone.runs(only, 9) == []


def test_a_state_that_was_taken_back_is_kept_for_what_it_has_seen() -> None:
    """A launch with a draft has filled and entered two blocks; the draft was wrong, and the state is that behind one."""
    books = Books(recurrent=True, rollback=True)
    first = books.starts(TEN[:3], 0)
    books.runs(first, 3)
    first.tokens += TEN[3:]
    assert books.cache.append(first, 12)
    books.runs(first, 4)
    books.cache.guard([first])
    books.runs(first, 12)
    assert books.cache.roll_back(first, 4)
    books.copies.clear()
    books.cache.free(first)
    assert len(books.copies) == 1
    kept = books.copies.pop()[1]
    assert books.starts([*TEN, 11], 1).computed == 4
    assert books.copies == [(kept, 1)]


def test_a_state_that_making_room_takes_is_not_started_from() -> None:
    """It is kept by a node of the tree, and the blocks are another continuation's own, so nothing retains that node."""
    books = Books(5, recurrent=True)
    first, other = books.starts(TEN, 0, siblings=2), books.starts(TEN[:8], 1)
    books.runs(other, 8)
    books.cache.free(other)
    first.computed = 10
    books.copies.clear()
    second = Text(TEN, 30, siblings=2)
    assert not books.cache.allocate(second, 2, [first], 0)  # from the beginning, for which there is too little
    assert (books.copies, len(books.cache.snapshots)) == ([], 0)
    books.cache.free(first)
    assert books.cache.allocate(second, 2, [], 0)


def test_a_long_prompt_is_kept_every_stride_at_the_end_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRIDE", 8)
    books = Books(recurrent=True)
    text = books.starts(list(range(1, 23)), 0)
    assert [books.cache.snapshot_end(text, end) for end in (3, 4, 10, 22)] == [3, 4, 8, 22]
    assert [bool(books.runs(text, n)) for n in (4, 8, 12, 15, 17, 20)] == [False, True, False, False, False, True]
    without = Books(recurrent=True, reuse=False)
    text = without.starts(list(range(1, 23)), 0)
    assert without.cache.snapshot_end(text, 10) == 10
    assert without.runs(text, 8) == []


def test_a_stop_token_that_ran_is_part_of_what_is_known() -> None:
    for computed, known in ((7, 7), (8, 8)):
        books = Books()
        text = books.starts(TEN[:6], 0)
        text.tokens += [7]
        text.stop_token = 8
        text.computed = computed
        books.cache.free(text)
        assert books.starts([*TEN[:8], 9, 10], 1).computed == known


@pytest.mark.parametrize("groups", [0, 1])
def test_behind_a_window_the_table_has_a_block_that_is_there(groups: int) -> None:
    books = Books(window=5, window_groups=groups)
    text = books.starts(list(range(1, 17)), 0)
    assert books.cache.append_windows(text, 12) == 12
    books.runs(text, 7)
    before = list(text.cache.window_blocks) if groups else text.cache.blocks.copy()
    assert -1 not in before
    assert () not in before
    books.runs(text, 8)  # from here on, tokens from 4 on are read
    if groups:
        assert text.cache.window_blocks == [(), *before[1:]]
        assert books.cache.window_tables[0, 0, :3].tolist() == [before[1][0], before[1][0], before[2][0]]  # type: ignore[index]
    else:
        assert text.cache.blocks == [-1, *before[1:]]
        assert books.cache.tables[0, :4].tolist() == [before[1], *before[1:]]
    assert text.cache.freed == 1


def test_what_fits_counts_the_blocks_of_windows() -> None:
    for n_blocks, fits in ((11, False), (12, True)):
        assert Books(n_blocks, window=5, window_groups=2).cache.fits(32) == fits
        assert Books(n_blocks + 2, window=6, window_groups=2).cache.fits(32) == fits
    assert not Books(window=5).cache.fits(33)


def test_room_is_left_for_those_that_run() -> None:
    for rules, wanted in (({}, 4), ({"window": 5, "window_groups": 1}, 8)):
        for n_blocks in (wanted - 1, wanted):
            cache = Books(n_blocks, **rules).cache
            assert cache.allocate(Text(TEN[:8], 30), 0, [], 2) == (n_blocks == wanted)


def test_a_text_whose_beginning_is_forgotten_is_not_entered() -> None:
    books = Books()
    text = books.starts(TEN, 0)
    books.runs(text, 4)
    books.cache.prefixes.forget(text.cache.blocks)
    books.runs(text, 8)
    assert (text.cache.indexed, len(books.cache.prefixes)) == (-1, 0)
    books.runs(text, 10)
    books.cache.free(text)
    assert len(books.cache.prefixes) == 0
    assert books.cache.pool.free == 32


def test_evictions_are_counted_and_nothing_stays_of_what_is_gone() -> None:
    store = Store(6)
    for first in (1, 2, 3):
        store.keep(first, first, first, salt=bytes([first]))
    assert (store.tree.evictions, store.tree.make_room(3), store.tree.evictions) == (0, True, 3)
    root = [*store.tree._roots.values()][-1]
    assert store.tree.make_room(6)
    assert (store.tree.evictions, store.tree._roots, store.tree._salts, root.alive) == (6, {}, {}, False)
    (block,) = store.pool.allocate(1)
    assert store.tree.insert(root, (1,), block) is None


def test_entries_of_leaves_do_not_grow_with_their_use() -> None:
    store = Store(8)
    for first in (1, 2, 3):
        store.keep(first)
    for _ in range(300):
        store.known(2)
        store.known(1)
    assert len(store.tree._leaves) <= 4 * 3 + 64
    assert len({id(node) for *_, node in store.tree._leaves}) == 3  # each of them can still be found
    assert store.tree.make_room(7)
    assert store.known(1) == 1  # the newest


def test_beginnings_of_texts_that_run_go_when_nothing_else_can() -> None:
    store = Store(6)
    for first in (1, 2):
        nodes = store.keep(first, first, first)
        store.tree.retain([nodes[1].block])  # as one does whose window has let go of the beginning
    assert store.tree.kept == 2
    assert store.tree.make_room(4)
    assert len(store.tree) == 0


def test_the_queue_gives_the_first_and_forgets_who_has_left() -> None:
    queue, texts = WaitingQueue(), [Text([1], 2) for _ in range(200)]
    for order, text in enumerate(texts):
        text.turn, text.order = -float(order // 2), order
        queue.push(text)
    assert texts[7] in queue
    queue.remove(texts[7])
    assert texts[7] not in queue
    assert [t.order for t in queue][:3] == [198, 199, 196]
    for text in texts[20:]:
        queue.remove(text)
    assert len(queue._heap) <= 2 * 20 + 64
    assert (len(queue), queue.pop()) == (19, texts[18])
