"""A continuation that starts from another one of its prompt, where the tree knows a text that begins alike."""

from __future__ import annotations

from quarrel.engine.cache import Cache, CacheRules
from quarrel.engine.results import FinishReason
from quarrel.engine.sequence import Sequence
from quarrel.errors import QuarrelError
from quarrel.ops.step import Limits


class Text(Sequence):
    keeps_prefix = True

    def accept(self, outputs: object, first: int, count: int, draft: object) -> int:
        return 0

    def end(self, reason: FinishReason, failure: QuarrelError | None = None) -> None: ...


def test_nothing_is_taken_of_the_text_that_only_begins_alike() -> None:
    """Its node is half known: neither the states kept behind that, nor its place in the tree, are this text's."""
    copied: list[tuple[int, int]] = []
    limits = Limits(64, 4, 8, 32, 4, n_states=12)
    cache = Cache(limits, lambda pairs: None, copied.extend, CacheRules(recurrent=True))

    def runs(text: Text, slot: int, family: list[Sequence]) -> None:
        assert cache.allocate(text, slot, family, 0)
        text.computed = len(text.tokens)
        cache.commit(text)

    older = Text([1, 17, 14], 16)
    runs(older, 0, [])
    older.tokens += [4, 18]
    assert cache.append(older, 5)
    older.computed = 5
    cache.commit(older)
    cache.free(older)
    assert cache.prefixes.match([1, 17, 14, 4, 9], 4).known == 4
    first = Text([1, 5, 6, 7, 8, 9], 16, siblings=2)
    runs(first, 1, [])
    cache.prefixes.forget(first.cache.blocks)  # and its states are gone for want of slots
    for at in list(first.cache.snapshots):
        cache.snapshots.drop(first.cache.snapshots[at])
    copied.clear()
    second = Text([1, 5, 6, 7, 8, 9], 16, siblings=2)
    assert cache.allocate(second, 2, [first], 0)
    assert (second.computed, copied) == (0, [])
    plain = Cache(limits, lambda pairs: None, copied.extend, CacheRules())
    cache = plain
    for text, slot, family in ((Text([1, 17, 14, 4, 18], 16), 0, []), (Text([1, 5, 6, 7, 8, 9], 16), 1, [])):
        runs(text, slot, family)  # type: ignore[arg-type]
        if not slot:
            plain.free(text)
    text.cache.indexed, text.cache.node = 0, None  # as before its first block is in the tree
    plain.prefixes.forget(text.cache.blocks)
    third = Text([1, 5, 6, 7, 8, 9], 16)
    assert plain.allocate(third, 2, [text], 0)
    assert third.computed == 5
    assert third.cache.node is None
