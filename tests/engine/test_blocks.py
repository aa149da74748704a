"""The pool knows who holds what."""

from __future__ import annotations

import pytest

from quarrel.engine.blocks import BlockPool
from quarrel.engine.prefix import MAX_KEPT, PrefixStore, common_prefix


def test_a_block_is_free_again_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    taken = pool.take(2)
    assert taken == [0, 1]
    pool.share([1])
    pool.give_back(taken)
    assert (pool.free, pool.holders(0), pool.holders(1)) == (2, 0, 1)
    pool.give_back([1])
    assert pool.free == 3


def test_giving_back_what_is_free_is_a_fault() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is free already"):
        pool.give_back([1])
    with pytest.raises(AssertionError, match="block 0 is free"):
        pool.share([0])
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.take(3)


def test_common_prefix_counts_equal_tokens() -> None:
    a = list(range(1000))
    assert common_prefix(a, a) == 1000
    assert common_prefix(a, [*a[:700], -1, *a[701:]]) == 700
    assert common_prefix(a, a[:3]) == 3
    assert common_prefix(a, []) == 0
    assert common_prefix([1], (2,)) == 0


def test_a_store_keeps_the_longest_of_what_begins_alike() -> None:
    pool = BlockPool(9)
    store = PrefixStore(pool, 2)
    store.keep([1, 2], pool.take(1))
    store.keep([1, 2, 3], pool.take(2))
    assert [e.tokens for e in store.entries()] == [(1, 2, 3)]
    store.keep([1, 2], pool.take(1))
    assert [e.tokens for e in store.entries()] == [(1, 2, 3)]
    assert pool.free == 7


def test_a_store_evicts_what_was_used_longest_ago() -> None:
    pool = BlockPool(4)
    store = PrefixStore(pool, 2)
    for first in (1, 2, 3):
        store.keep([first], pool.take(1))
    store.touch(store.entries()[0])
    assert store.make_room(2)
    assert [e.tokens for e in store.entries()] == [(3,), (1,)]
    assert not store.make_room(5)
    assert (len(store), pool.free) == (0, 4)


def test_a_store_is_bounded() -> None:
    pool = BlockPool(100)
    store = PrefixStore(pool, 2)
    for first in range(60):
        store.keep([first], pool.take(1))
    assert len(store) == MAX_KEPT
    assert pool.free == 100 - MAX_KEPT
