"""The pool knows who holds what; the tree finds what begins alike, believes only equal tokens, and forgets the oldest."""

from __future__ import annotations

import pytest

from quarrel.engine.pools import BlockPool, Snapshots
from quarrel.engine.prefix import Node, PrefixTree, common_prefix, keyed_digest


def test_a_block_is_free_again_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    taken = pool.allocate(2)
    assert taken == [0, 1]
    pool.retain([1])
    pool.release(taken)
    assert (pool.free, pool.ref_count(0), pool.ref_count(1)) == (2, 0, 1)
    pool.release([1])
    assert pool.free == 3


def test_giving_back_what_is_free_is_a_fault() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is free already"):
        pool.release([1])
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.retain([0])
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)


def test_common_prefix_counts_equal_tokens() -> None:
    a = list(range(1000))
    assert common_prefix(a, a) == 1000
    assert common_prefix(a, [*a[:700], -1, *a[701:]]) == 700
    assert common_prefix(a, [*a[:5], -1, *a[6:]]) == 5
    assert common_prefix(a, a[:3]) == 3
    assert common_prefix(a, []) == 0
    assert common_prefix([1], (2,)) == 0


class Store:
    """A tree over blocks of two tokens."""

    def __init__(self, n_blocks: int, *, limit: int | None = None, constant: bool = False) -> None:
        self.pool, self.snapshots = BlockPool(n_blocks), Snapshots(0, 3)
        digest = (lambda before, tokens: b"same") if constant else None
        self.tree = PrefixTree(self.pool, 2, self.snapshots, limit=limit, digest=digest)

    def keep(self, *tokens: int, salt: bytes = b"") -> list[Node]:
        """A text that is over; its blocks belong to the tree alone, where it took them."""
        blocks = self.pool.allocate(-(-len(tokens) // 2))
        nodes: list[Node] = []
        for i, block in enumerate(blocks):
            node = self.tree.insert(nodes[-1] if nodes else None, tokens[2 * i : 2 * i + 2], block, salt)
            if node is None:
                break
            nodes.append(node)
        self.tree.release(blocks)
        return nodes

    def known(self, *tokens: int, salt: bytes = b"") -> int:
        return self.tree.match(tokens, len(tokens), salt).known


def test_a_text_is_found_as_far_as_it_is_alike() -> None:
    store = Store(9)
    store.keep(1, 2, 3, 4, 5)
    assert [store.known(*t) for t in ((1, 2, 3, 4, 5, 6), (1, 2, 3), (1, 2, 9), (1, 9), (9,), ())] == [5, 3, 2, 1, 0, 0]
    assert [n.block for n in store.tree.match([1, 2, 3, 4, 5], 4).nodes] == [0, 1]


def test_callers_of_different_salts_never_meet() -> None:
    store = Store(9)
    store.keep(1, 2, 3, salt=b"one")
    assert (store.known(1, 2, 3), store.known(1, 2, 3, salt=b"two"), store.known(1, 2, 3, salt=b"one")) == (0, 0, 3)


def test_hashes_of_two_processes_differ() -> None:
    assert keyed_digest()(b"", b"x") != keyed_digest()(b"", b"x")


def test_equal_hashes_of_different_texts_are_a_miss() -> None:
    store = Store(9, constant=True)
    store.keep(1, 2)
    assert store.known(3, 4) == 0
    assert not store.keep(3, 4)
    assert store.known(1, 2) == 2
    assert len(store.tree) == 1


def test_what_goes_on_takes_the_place_of_what_it_goes_on_from() -> None:
    store = Store(9)
    (half,) = store.keep(1)
    store.snapshots.add(half.snapshots, 1)
    nodes = store.keep(1, 2, 3)
    assert len(store.tree) == 2
    assert nodes[0].snapshots == {1: 0}
    assert not half.snapshots
    assert store.keep(1) == [nodes[0]]  # nothing new
    assert store.pool.free == 7


def test_the_least_recently_used_leaves_go_first() -> None:
    store = Store(4)
    for first in (1, 2, 3):
        store.keep(first)
    store.known(1)
    assert store.tree.make_room(2)
    assert [store.known(i) for i in (1, 2, 3)] == [1, 0, 1]
    assert not store.tree.make_room(5)
    assert (len(store.tree), store.pool.free, store.tree.kept) == (0, 4, 0)


def test_a_beginning_stays_as_long_as_something_stands_on_it() -> None:
    store = Store(4)
    store.keep(1, 2, 3, 4, 5, 6)
    store.known(1, 2)  # the newest
    store.tree.make_room(2)
    assert store.known(1, 2, 3, 4, 5, 6) == 4


def test_what_is_held_is_not_evicted_and_may_be_afterwards() -> None:
    store = Store(3)
    (node,) = store.keep(1, 2)
    store.tree.retain([node.block])
    assert not store.tree.make_room(3)
    store.tree.release([node.block])
    assert store.tree.make_room(3)


def test_a_limit_holds_for_what_nobody_uses() -> None:
    store = Store(100, limit=5)
    for first in range(60):
        store.keep(first, first, first)
    assert store.tree.kept == len(store.tree) == 5


def test_forgetting_takes_all_that_stands_on_it() -> None:
    store = Store(9)
    first, *_ = store.keep(1, 2, 3, 4, 5)
    store.keep(7)
    store.tree.forget([first.block])
    assert (store.known(1, 2, 3), store.known(7), len(store.tree)) == (0, 1, 1)


def test_the_slot_used_longest_ago_goes_for_a_new_copy() -> None:
    snapshots = Snapshots(4, 6)
    one: dict[int, int] = {}
    two: dict[int, int] = {}
    assert (snapshots.add(one, 7), snapshots.add(two, 7)) == (4, 5)
    snapshots.touch(4)
    assert snapshots.add(one, 9) == 5
    assert (one, two) == ({7: 4, 9: 5}, {})
    assert snapshots.add(one, 9) is None  # it is there
    snapshots.move(one, 9, two, 1)
    assert (one, two) == ({7: 4}, {1: 5})
    snapshots.move(two, 1, one, 7)
    assert (one, two, len(snapshots)) == ({7: 4}, {}, 1)  # what is there already stays
    assert snapshots.add(two, 1) == 5
    snapshots.drop(4)
    snapshots.drop(5)
    assert (len(snapshots), one, two) == (0, {}, {})
    assert Snapshots(4, 4).add(one, 1) is None
