"""From where a sequence starts, what it gets, and what it leaves: at the edges of blocks, windows, slots and room."""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens

import pytest

from quarrel.engine import cache as module
from quarrel.engine.cache import Cache, CacheRules
from quarrel.engine.prefix import Match
from quarrel.ops.step import Limits
from tests.engine.test_reuse import TEN, Books, Text

SIZE = 4
KINDS: dict[str, dict[str, int | bool]] = {
    "plain": {},
    "recurrent": {"recurrent": True},
    "window": {"window": 6, "window_groups": 2},
    "narrow": {"window": 2, "window_groups": 1},
}


class Watched:
    """A cache whose copies are listed."""

    def __init__(self, n_blocks: int, n_states: int = 12, **rules: int | bool) -> None:
        self.blocks: list[tuple[int, int]] = []
        self.states: list[tuple[int, int]] = []
        limits = Limits(64, 4, 8, n_blocks, SIZE, n_states=n_states, window_groups=int(rules.get("window_groups", 0)))
        self.cache = Cache(limits, self.blocks.extend, self.states.extend, CacheRules(**rules))  # type: ignore[arg-type]

    def best(self, tokens: Tokens[int], match: Match) -> tuple[int, int | None]:
        """How much of a text can be started behind, and from which copy of state: tried from the end, token by token."""
        rules, nodes = self.cache.rules, match.nodes
        copies = {i * SIZE + at: slot for i, node in enumerate(nodes) for at, slot in node.snapshots.items()}
        for at in range(min(match.known, len(tokens) - 1), 0, -1):
            oldest = max(0, at + 1 - rules.window) // SIZE  # the block of the oldest key that the next query reads
            read = range(oldest, -(-at // SIZE)) if rules.window_groups else range(0)
            if all(nodes[i].window_blocks for i in read) and (at in copies or not rules.recurrent):
                return at, copies.get(at)
        return 0, None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_sequence_starts_as_far_on_as_anything_that_is_kept_allows(kind: str, seed: int) -> None:
    chance, watched = random.Random(seed), Watched(60, **KINDS[kind])
    cache, texts = watched.cache, [TEN]
    for _ in range(25):
        tokens = [*chance.choice(texts)[: chance.randint(0, 30)], *chance.choices((1, 2, 3), k=chance.randint(1, 9))][:30]
        texts.append(tokens)
        match = cache.prefixes.match(tokens, len(tokens) - 1)
        known, state = watched.best(tokens, match)
        found = cache.known(tokens[:-1], b"")
        assert (found.known, found.state) == (known, state)
        watched.blocks.clear()
        watched.states.clear()
        hits, misses = cache.hits, cache.misses
        text, slot = Text(tokens, 32), chance.randrange(4)
        assert cache.allocate(text, slot, [], 0)
        mine, count = text.cache, known // SIZE
        assert (text.computed, mine.found, mine.snapshot_at, mine.indexed, text.slot) == (known, known, known, count, slot)
        assert (cache.hits - hits, cache.misses - misses) == (known, len(tokens) - known)
        assert watched.states == ([] if state is None else [(state, slot)])
        assert mine.blocks[:count] == [n.block for n in match.nodes[:count]]
        assert mine.node is (match.nodes[count - 1] if count else None)
        assert len(mine.blocks) == cache.blocks_for(len(tokens))
        copied = []
        if known % SIZE:
            last = match.nodes[count]
            copied = [(last.block, mine.blocks[count])]
            if cache.rules.window_groups:
                copied += zip(last.window_blocks, mine.window_blocks[count])
        assert watched.blocks == copied
        assert cache.tables[slot, : len(mine.blocks)].tolist() == mine.blocks
        if cache.rules.window_groups:
            first = max(0, known + 1 - cache.rules.window) // SIZE
            assert mine.freed == first
            assert [bool(blocks) for blocks in mine.window_blocks] == [i >= first for i in range(len(mine.window_blocks))]
        while text.computed < len(tokens):
            end = min(len(tokens), text.computed + chance.randint(1, 9))
            end = cache.snapshot_end(text, cache.append_windows(text, end))
            before = text.computed
            assert end > before
            if cache.rules.window_groups:
                _check_tables(cache, text)
            text.computed = end
            cache.commit(text)
            assert mine.indexed == end // SIZE
            if cache.rules.window_groups:
                gone = max(0, end + 1 - cache.rules.window) // SIZE
                assert mine.freed == gone
                assert [bool(blocks) for blocks in mine.window_blocks[: gone + 1]] == [
                    i >= gone for i in range(len(mine.window_blocks[: gone + 1]))
                ]
        cache.free(text)
        assert (text.slot, text.computed, text.cache.blocks) == (-1, 0, [])
        # A longer text's last block may stand for its own, and may have lost its windows.
        least = len(tokens) - len(tokens) % SIZE if cache.rules.window_groups else len(tokens)
        assert cache.known(tokens, b"").known >= least
        nodes = cache.prefixes.nodes()
        if chance.random() < 0.4:
            cache.prefixes._drop_windows(chance.choice(nodes))
        if chance.random() < 0.4 and len(cache.snapshots):
            cache.snapshots.drop(chance.choice([slot for n in nodes for slot in n.snapshots.values()]))
    cache.prefixes.clear()
    assert cache.pool.free == 60


def _check_tables(cache: Cache, text: Text) -> None:
    """What the tables say of windows: a block of the sequence's own everywhere, its first one that is read in front."""
    blocks = text.cache.window_blocks
    first = next((i for i, own in enumerate(blocks) if own), len(blocks))
    for i in range(len(blocks)):
        assert tuple(cache.window_tables[:, text.slot, i]) == blocks[max(i, first)]


@pytest.mark.parametrize(
    ("rules", "wanted"), [({}, True), ({"recurrent": True}, False), ({"recurrent": True, "rollback": True}, True)]
)
def test_drafts_need_a_way_back(rules: dict[str, bool], wanted: bool) -> None:
    assert CacheRules(**rules).drafts == wanted


def test_a_launch_with_a_draft_keeps_the_state_beside_and_takes_it_back() -> None:
    books = Books(recurrent=True, rollback=True)
    text, plain = books.starts(TEN, 2), Books(recurrent=True)
    books.cache.guard([text])
    assert books.copies == [(2, 6)]
    text.computed = 10
    assert books.cache.roll_back(text, 7)
    assert (text.computed, books.copies) == (7, [(2, 6), (6, 2)])
    books.cache.guard([])
    other = plain.starts(TEN, 2)
    plain.cache.guard([other])
    assert not plain.cache.roll_back(other, 7)
    assert (plain.copies, other.computed, len(books.copies)) == ([], 0, 2)


def test_state_that_has_seen_more_than_the_text_is_not_kept_for_it() -> None:
    """One step too many had been launched when it ended."""
    for ran, kept in ((10, True), (11, False)):
        books = Books(recurrent=True)
        text = books.starts(TEN, 0)
        text.n_prompt, text.computed = 4, ran
        books.cache.free(text)
        assert bool(books.copies) == kept == bool(len(books.cache.snapshots))


def test_one_slot_is_enough_to_keep_a_state() -> None:
    for slots, known in ((4, 0), (5, 10)):
        watched = Watched(32, slots, recurrent=True)
        text = Text(TEN, 30)
        assert watched.cache.allocate(text, 0, [], 0)
        text.computed = 10
        watched.cache.commit(text)
        watched.cache.free(text)
        assert watched.cache.known([*TEN, 11], b"").known == known


def test_a_long_answer_is_kept_every_stride_where_its_tokens_are_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRIDE", 8)
    for length, copies in ((13, 1), (12, 0)):
        books = Books(recurrent=True)
        text = books.starts(TEN[:4], 0)
        books.runs(text, 4)
        text.tokens += range(5, length + 1)
        assert books.cache.append(text, length)
        assert [len(books.runs(text, at)) for at in (8, 11, 12)] == [0, 0, copies]


def test_a_piece_ends_where_state_is_worth_keeping() -> None:
    books = Books(recurrent=True)
    text = books.starts(TEN, 0, siblings=2)
    assert [books.cache.snapshot_end(text, end) for end in (3, 4, 5, 8, 9, 10)] == [3, 4, 4, 8, 8, 9]
    text.computed = 8
    assert [books.cache.snapshot_end(text, end) for end in (9, 10)] == [9, 9]
    text.keeps_prefix = False
    assert books.cache.snapshot_end(text, 10) == 10


def test_of_the_tree_and_a_sibling_the_one_that_knows_more_is_started_from() -> None:
    for ran, known, shared in ((4, 9, "tree"), (9, 9, "tree"), (10, 9, "tree")):
        books = Books()
        first = books.starts(TEN, 0)
        first.computed = 10
        books.cache.free(first)
        sibling = Text(TEN, 30, siblings=2)
        sibling.keeps_prefix = False
        assert books.cache.allocate(sibling, 1, [], 0)
        sibling.keeps_prefix, sibling.computed = True, ran
        last = Text(TEN, 30, siblings=2)
        assert books.cache.allocate(last, 2, [sibling], 0)
        assert (last.computed, last.cache.blocks[0] == sibling.cache.blocks[0]) == (known, shared != "tree")
    books = Books()
    sibling = books.starts(TEN, 0, siblings=2)
    sibling.computed = 7  # and nothing is in the tree yet
    last = Text(TEN, 30, siblings=2)
    assert books.cache.allocate(last, 1, [sibling], 0)
    assert (last.computed, last.cache.blocks[0]) == (7, sibling.cache.blocks[0])


def test_nothing_is_taken_from_a_sibling_whose_beginning_is_behind_its_window() -> None:
    books = Books(window=5, reuse=True)
    sibling = books.starts(TEN, 0, siblings=2)
    sibling.computed, sibling.cache.blocks[0] = 9, -1
    last = Text(TEN, 30, siblings=2)
    assert books.cache.allocate(last, 1, [sibling], 0)
    assert last.computed == 0


@pytest.mark.parametrize("groups", [0, 2])
def test_the_last_free_block_can_be_had_and_not_one_more(groups: int) -> None:
    """A step of one token at the edge of a block, in pools from too small to just enough."""
    rules: dict[str, int] = {"window": 5, "window_groups": groups} if groups else {}
    for spare in range(3 + groups):
        first = 2 + 2 * groups  # eight tokens
        books = Books(first + spare, **rules)
        text = books.starts(TEN[:8], 0)
        assert books.cache.append_windows(text, 8) == 8
        assert (books.cache.pool.free, books.cache.append(text, 8)) == (spare, True)
        assert books.cache.append(text, 9) == (spare >= 1 + groups)
        taken = (1 + groups) * (spare >= 1 + groups)
        assert books.cache.pool.free == spare - taken
        assert len(text.cache.blocks) == 2 + bool(taken)
        assert len(text.cache.window_blocks) == (2 + bool(taken)) * bool(groups)
        if taken:
            assert books.cache.tables[0, :3].tolist() == text.cache.blocks
            assert books.cache.append(text, 12)  # there is room in it
            assert not books.cache.append(text, 13) or spare >= 2 * (1 + groups)


def test_a_text_gets_in_with_as_many_blocks_as_its_windows_come_to() -> None:
    """Nine tokens are known. Behind them it reads blocks 1 and 2 of each group, the first of which it shares."""
    for n_blocks, known in ((9, 8), (10, 9)):
        books = Books(n_blocks, window=6, window_groups=2)
        text = books.starts(TEN[:9], 0)
        assert books.cache.append_windows(text, 9) == 9
        books.runs(text, 9)
        books.cache.free(text)
        later = Text([*TEN[:9], 99], 30)
        assert books.cache.allocate(later, 1, [], 0)
        assert later.computed == known  # for a copy of what is known of the third block there may be no room


def test_windows_are_taken_as_far_as_there_are_blocks() -> None:
    for free, end in ((0, 8), (1, 8), (2, 12), (3, 12), (4, 14)):
        books = Books(4 + 4 + free, window=5, window_groups=2)
        text = books.starts([*TEN, 11, 12, 13, 14], 0)
        assert books.cache.append_windows(text, 8) == 8
        assert books.cache.pool.free == free
        assert books.cache.append_windows(text, 14) == end
        assert books.cache.pool.free == free % 2
    assert Books().cache.append_windows(text, 14) == 14


def test_a_text_that_starts_in_a_block_is_copied_only_where_there_is_a_block_for_that() -> None:
    """Else it starts at the block's beginning; with recurrent layers at one where a state is kept."""
    for n_blocks, known in ((6, 10), (5, 8)):
        books = Books(n_blocks)
        first = books.starts(TEN, 0)
        first.computed = 10
        books.cache.free(first)
        assert books.starts([*TEN, *range(11, 20)], 1).computed == known
    for state, known in ((8, 8), (9, 0)):
        watched = Watched(5, recurrent=True)
        text = Text(TEN, 30)
        assert watched.cache.allocate(text, 0, [], 0)
        text.computed = 10
        watched.cache.commit(text)
        watched.cache.free(text)
        nodes = watched.cache.prefixes.match(TEN, 10).nodes
        watched.cache.snapshots.add(nodes[(state - 1) // SIZE].snapshots, state - (state - 1) // SIZE * SIZE)
        later = Text([*TEN, *range(11, 20)], 30)
        assert watched.cache.allocate(later, 1, [], 0)
        assert later.computed == known


def test_what_is_known_of_a_window_s_beginning_is_no_longer_than_its_blocks_are_there() -> None:
    cache = Books(window=2).cache
    assert [cache.first(at) for at in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]
    assert [Books(window=9).cache.first(at) for at in (11, 12, 16)] == [0, 1, 2]


def test_a_narrow_window_s_blocks_go_as_soon_as_they_are_kept() -> None:
    books = Books(window=2, window_groups=1)
    text = books.starts(TEN, 0)
    assert books.cache.append_windows(text, 10) == 10
    for at, freed in ((4, 0), (5, 1), (8, 1), (9, 2)):
        books.runs(text, at)
        assert text.cache.freed == freed
    without = Books(window=2, reuse=False)
    text = without.starts(TEN, 0)
    for at, freed, free in ((4, 0, 29), (5, 1, 30), (8, 1, 30), (9, 2, 31)):
        without.runs(text, at)
        assert (text.cache.freed, without.cache.pool.free) == (freed, free)
    without.cache.free(text)
    assert without.cache.pool.free == 32


def test_who_was_refused_for_those_that_run_is_let_in_when_they_are_fewer() -> None:
    """Each is left a block; what is free is the same. That he was refused before changes nothing."""
    for rules in ({}, {"window": 5, "window_groups": 1}):
        let_in = []
        for forgets in (False, True):
            books = Books(9, **rules)
            known = books.starts(TEN[:4], 0)
            books.cache.append_windows(known, 4)
            books.runs(known, 4)
            books.cache.free(known)
            waits = Text(TEN[:8], 30)
            for spare in range(9, -1, -1):
                if forgets:
                    waits.cache.refusal = None
                if books.cache.allocate(waits, 1, [], spare):
                    let_in.append(spare)
                    break
        assert let_in[0] == let_in[1] > 0


def test_who_was_refused_is_looked_up_again_when_something_has_changed() -> None:
    books = Books(7, recurrent=True)
    first = books.starts(TEN[:8], 0)
    books.runs(first, 8)
    holds = books.starts([9] * 12, 1)
    waits = Text([*TEN, *range(11, 20)], 30)
    assert not books.cache.allocate(waits, 2, [], 0)
    refusal = waits.cache.refusal
    assert refusal is not None
    assert not books.cache.allocate(waits, 2, [], 0)
    assert waits.cache.refusal is refusal  # nothing has changed, nothing was looked up
    node = books.cache.prefixes.match(TEN, 8).nodes[0]
    for change in ("a state", "a window"):
        if change == "a state":
            books.cache.snapshots.add(node.snapshots, 4)
        else:
            books.cache.prefixes.insert(None, TEN[:4], 0)  # which was there without
        assert not books.cache.allocate(waits, 2, [], 0)
        assert waits.cache.refusal is not refusal
        refusal = waits.cache.refusal
    holds.keeps_prefix = False
    books.cache.free(holds)
    assert books.cache.allocate(waits, 2, [], 0)
    assert waits.computed == 8
