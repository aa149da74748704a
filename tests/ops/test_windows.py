"""Layers with a window in groups of their own: the same results from tables of their own, and where that is worth it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quarrel.errors import RequestError
from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.ops.attention import AttentionSpec, KVAppendSpec, attention, kv_append
from quarrel.ops.contract import CacheRef, KVArrays, RawWeight, WeightRef
from quarrel.ops.embedding import embedding
from quarrel.ops.linear import add
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Program
from quarrel.ops.reference import run_program
from quarrel.ops.step import Limits, StepInputs
from quarrel.ops.windows import by_window, by_window_if_smaller

HEADS, DIM, SIZE, VOCAB = 2, 16, 4, 30


class Weights:
    def raw(self, ref: WeightRef) -> RawWeight:
        return draw.weight(np.random.default_rng(1), ref.type, ref.rows, ref.k, 1.0)


def program(windows: list[int], last: int = DIM) -> Program:
    """A stream to which each layer adds what it attends to; `last` is the width of the last one's heads."""
    b = Builder()
    h = embedding(b, b.input("ids"), WeightRef("embd", GGMLType.F32, VOCAB, HEADS * DIM), 1.0)
    for i, window in enumerate(windows):
        dim, heads = (last, HEADS * DIM // last) if i == len(windows) - 1 else (DIM, HEADS)
        cache = b.cache(KVLayer(heads, dim, window))
        kv_append(b, KVAppendSpec(heads, dim), h, h, cache)
        h = add(b, h, attention(b, AttentionSpec(heads, heads, dim, 0.3, window), h, cache))
    return b.program(hidden=h)


def test_groups_are_as_many_layers_as_have_no_window() -> None:
    made = by_window(program([6, 0, 6, 6, 0, 9]))
    assert (len(made.caches), made.window_groups, made.window) == (2, 2, 9)
    assert {c.window for c in made.caches} == {0}
    found = [
        (ref.layer, table.name)
        for node in made.nodes
        if node.op.name == "attention"
        for table, ref in [node.inputs[3:5]]
        if isinstance(ref, CacheRef)
    ]
    groups = ["block_table.1", "block_table", "block_table.1", "block_table.2", "block_table", "block_table.2"]
    assert found == list(zip([0, 0, 1, 0, 1, 1], groups))
    many = by_window(program([0, *[6] * 20]))
    assert (len(many.caches), many.window_groups) == (3, 7)


@pytest.mark.parametrize("given", [[0, 0], [5, 5], [0]])
def test_nothing_changes_where_there_is_one_kind_of_layer(given: list[int]) -> None:
    made = program(given)
    assert by_window(made) is made


def test_nothing_changes_where_layers_keep_unlike_rows() -> None:
    made = program([0, 5], last=8)
    assert by_window(made) is made


def test_it_is_done_where_contexts_are_clearly_longer_than_windows() -> None:
    made = program([0, 100, 0, 100])
    assert by_window_if_smaller(made, 100) is made
    assert by_window_if_smaller(made, 120) is made
    assert by_window_if_smaller(made, 1000).window_groups == 1


def inputs(ids: list[int], past: int, tables: list[list[int]]) -> StepInputs:
    """One sequence, whose groups have these blocks."""
    at = np.arange(past, past + len(ids), dtype=np.int32)
    table = np.array(tables, np.int32)
    slots = table[:, at // SIZE] * SIZE + at % SIZE
    step = np.array([0, len(ids)], np.int32)
    length = np.array([past + len(ids)], np.int32)
    made = StepInputs(np.array(ids, np.int32), at, slots[0], step, length, table[:1], at - past)
    return made if len(tables) == 1 else replace(made, window_slots=slots[1:], window_tables=table[1:, None])


def test_tables_of_their_own_give_the_same_results() -> None:
    """Blocks behind the window are another's by then."""
    plain = program([0, 6, 6])
    grouped = by_window(plain)
    assert grouped.window_groups == 2
    rng = np.random.default_rng(0)
    caches = {}
    for made in (plain, grouped):
        empty = np.full((20, SIZE, HEADS, DIM), np.nan, np.float32)
        caches[made.window_groups] = [KVArrays(empty, empty) for _ in made.caches]
    past, order = 0, [3, 9, 1, 14, 7, 11, 0, 5, 2, 8, 19, 6, 10, 4, 13]
    for count in (9, 5, 1, 4):
        ids = rng.integers(0, VOCAB, count).tolist()
        tables = [order[:5], order[5:10], order[10:15]]
        first = max(0, past + 1 - 6) // SIZE
        for table in tables[1:]:
            table[:first] = [table[first]] * first
        want = run_program(plain, Weights(), caches[0], inputs(ids, past, tables[:1]))["hidden"]
        got = run_program(grouped, Weights(), caches[2], inputs(ids, past, tables))["hidden"]
        assert np.array_equal(got, want)
        past += count


def test_tables_that_do_not_fit_the_limits_are_refused() -> None:
    limits = Limits(max_tokens=8, max_seqs=2, max_blocks_per_seq=4, n_blocks=20, block_size=SIZE, window_groups=2)
    good = inputs([1, 2], 0, [[1], [2], [3]])
    good.check(limits, VOCAB)
    assert good.window_slots is not None
    assert good.window_tables is not None
    for bad, said in (
        ({"window_slots": None}, "groups of layers"),
        ({"window_slots": good.window_slots[:1]}, "groups of layers"),
        ({"window_tables": good.window_tables[:, :, :0]}, "groups of layers"),
        ({"window_slots": good.window_slots + 100}, "slots of a window"),
        ({"window_tables": good.window_tables - 5}, "block table of a window"),
    ):
        with pytest.raises(RequestError, match=said):
            replace(good, **bad).check(limits, VOCAB)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="groups of layers"):
        good.check(replace(limits, window_groups=0), VOCAB)
