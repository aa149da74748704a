"""Norms of heads, and a rotation of queries alone, that attention computes in a step of one sequence: the bits of launches
of their own, and none of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch

from quarrel.gguf import GGMLType
from quarrel.ops.attention import AttentionSpec, RopeAppendSpec, attention, rope_append
from quarrel.ops.contract import ConstRef, Value
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.kv import KVType
from quarrel.ops.linear import linear, linear_add
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Program
from quarrel.ops.rope import RopeSpec, rope, rotated_by
from quarrel.ops.step import Limits, StepInputs
from quarrel.triton_backend import fuse
from quarrel.triton_backend.attention import left, paged
from quarrel.triton_backend.attention.left import left_to_attention, of_one
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.runtime.site import Batch
from quarrel.triton_backend.step import TritonStep
from tests.triton_backend.test_fuse import K, launches, ref
from tests.triton_backend.test_step import LIMITS, VOCAB, Weights, batch

LONGER = replace(LIMITS, max_blocks_per_seq=12)
"""192 keys: two splits of narrow heads, six of wide ones."""


@dataclass(frozen=True)
class Heads:
    """An attention: `norms` of its query, key and value are normed; `borrows`: another one reads its keys, too."""

    dim: int
    style: Literal["norm", "neox"] = "neox"
    norms: int = 2
    window: int = 0
    rot: int = 0
    axes: int = 1
    heads: int = 4
    n_kv: int = 2
    sinks: bool = False
    borrows: bool = False
    keeps: int | None = None
    """Of which norm the result is one of the program, too."""

    def program(self) -> Program:
        b, counts = Builder(), (self.heads, self.n_kv, self.n_kv, self.heads)
        h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, K))
        xs = [linear(b, h, ref(name, GGMLType.Q4_0, n * self.dim, K)) for n, name in zip(counts, "qkvr")]

        def normed(i: int) -> Value:
            return norm(b, NormSpec("rms", self.dim, 1e-5, counts[i]), xs[i], ref(f"gain{i}", GGMLType.F32, 1, self.dim))

        for i in (2, 0, 1) if self.norms == 3 else range(self.norms):  # values first, as in Gemma 4
            xs[i] = normed(i)
        turns = RopeSpec(self.style, self.heads, self.dim, self.rot or self.dim, 1.1, axes=self.axes)
        of_pairs = [1000.0 ** (-2.0 * i / turns.n_rot) for i in range(turns.half)]
        by_axis = [f if i % self.axes == axis else 0.0 for axis in range(self.axes) for i, f in enumerate(of_pairs)]
        cache, freq = b.cache(KVLayer(self.n_kv, self.dim)), ConstRef("freq", tuple(by_axis))
        spec = AttentionSpec(self.heads, self.n_kv, self.dim, 0.05, self.window, sinks=self.sinks)
        sinks = ref("sinks", GGMLType.F32, 1, self.heads) if self.sinks else None
        q = rope_append(b, RopeAppendSpec(turns, replace(turns, n_heads=self.n_kv)), *xs[:3], freq, cache)
        y = attention(b, spec, q, cache, sinks)
        h = linear_add(b, h, y, ref("o", GGMLType.Q8_0, K, self.heads * self.dim))
        if self.borrows:
            y = attention(b, spec, rope(b, turns, normed(3), rotated_by(b, turns), freq), cache, sinks)
            h = linear_add(b, h, y, ref("p", GGMLType.Q8_0, K, self.heads * self.dim))
        more = {} if self.keeps is None else {"kept": xs[self.keeps]}
        return b.program(hidden=gather_rows(b, h, b.input("out_rows")), **more)

    def inputs(self, parts: list[tuple[int, int, int]], seed: int = 3) -> StepInputs:
        made = batch(parts, seed=seed)
        places = np.stack([made.positions // (1 + axis) for axis in range(self.axes)], 1).astype(np.int32)
        return replace(made, places=places) if self.axes > 1 else made


Found = list[tuple[np.ndarray, Counter[str], list[torch.Tensor]]]


def ran(
    backend: TritonBackend, heads: Heads, parts: Sequence[list[tuple[int, int, int]]], limits: Limits = LONGER
) -> Found:
    """Of each step what is hidden, its launches, and the cache after it; what a step has not written is NaN."""
    made, found = heads.program(), []
    step = backend.compile(made, Weights(frozenset({f"gain{i}" for i in range(4)} | {"q", "k"})), limits, "float16")
    assert isinstance(step, TritonStep)
    (store,) = step._plan.caches
    arrays = [store.k, store.v]
    for array, seed in zip(arrays, (1, 2)):
        values = torch.from_numpy(np.random.default_rng(seed).normal(size=array.shape).astype(np.float32))
        array.copy_(values.to(array.dtype) if array.dtype != torch.uint8 else values.abs().clamp(0, 2) * 20)
    for scales in store.both_scales:
        if array.dtype == torch.uint8:
            scales.fill_(0.05)
    names = launches(step)
    for some in parts:
        step._plan.fill(255)
        names.clear()
        hidden = step(heads.inputs(some), "hidden").hidden
        assert np.isfinite(hidden).all()
        found.append((hidden, Counter(names), [a.clone() for a in arrays]))
    step.close()
    return found


def both_ways(
    backend: TritonBackend,
    monkeypatch: pytest.MonkeyPatch,
    heads: Heads,
    parts: Sequence[list[tuple[int, int, int]]],
    limits: Limits = LONGER,
) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """Launches of each step, and those where attention computes no norms; all with the same bits."""
    inside = ran(backend, heads, parts, limits)
    with monkeypatch.context() as patched:
        patched.setattr(left, "_norms", lambda *_: ())
        patched.setattr(left, "_turns", lambda *_: False)
        apart = ran(backend, heads, parts, limits)
    for (one, _, store), (other, _, stored) in zip(inside, apart, strict=True):
        assert np.array_equal(one, other)
        assert all(torch.equal(a, b) for a, b in zip(store, stored, strict=True))
    return [names for _, names, _ in inside], [names for _, names, _ in apart]


ONE = [[(0, past, 1)] for past in (0, 31, 32, 150)]
"""The first key of all, the last of a split and of a block, the first of another, and several splits."""
OF_HEAD = {
    "three norms": Heads(256, norms=3),
    "two": Heads(256, "norm", window=24, heads=2),
    "one, groups of 3": Heads(256, norms=1, heads=3, n_kv=1, sinks=True),
    "three of 512, window": Heads(512, norms=3, window=40, heads=2, n_kv=1),
    "some columns, three axes": Heads(256, rot=64, axes=3, heads=2, n_kv=1),
    "some columns in pairs": Heads(256, "norm", norms=3, rot=96, heads=2, n_kv=1),
}
OF_ONE = {
    "128": Heads(128, norms=2, heads=6),
    "128, window": Heads(128, "norm", norms=3, window=24, sinks=True),
    "64": Heads(64, "norm", norms=2),
    "32": Heads(32, norms=1, n_kv=4),
}
GONE = {1: Counter(norm_rows=1), 2: Counter(head_norms=1), 3: Counter(head_norms=1)}


@pytest.mark.parametrize("heads", [*OF_HEAD.values(), *OF_ONE.values()], ids=[*OF_HEAD, *OF_ONE])
def test_attention_of_one_sequence_norms_heads_with_the_same_bits(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, heads: Heads
) -> None:
    inside, apart = both_ways(backend, monkeypatch, heads, ONE)
    kernel = "attend_head" if heads.dim > 128 else "attend_one"
    for one, other in zip(inside, apart):
        assert other - one == GONE[heads.norms]
        assert not one - other
        assert one[kernel] == 1
        assert one["rope_append_rows"] == 0


@pytest.mark.parametrize("heads", list(OF_HEAD.values())[:5:2], ids=list(OF_HEAD)[:5:2])
def test_a_program_to_each_key_head_norms_wide_heads_too(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, heads: Heads
) -> None:
    monkeypatch.setattr(paged, "HEAD_PROGRAMS", 0)
    inside, apart = both_ways(backend, monkeypatch, heads, ONE[1:])
    for one, other in zip(inside, apart):
        assert other - one == GONE[heads.norms]
        assert one["attend_one"] == 1


@pytest.mark.parametrize(
    "heads",
    [
        Heads(256, norms=2, window=24, heads=2, n_kv=1, borrows=True),
        Heads(128, "norm", norms=0, sinks=True, borrows=True),
        Heads(256, norms=2, rot=64, heads=2, n_kv=1, borrows=True),
    ],
    ids=["wide", "narrow", "some columns"],
)
def test_queries_over_another_layers_keys_are_normed_and_rotated_inside(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, heads: Heads
) -> None:
    """The layer whose keys they are has launches of its own: two attentions read its cache."""
    inside, apart = both_ways(backend, monkeypatch, heads, [[(0, 0, 5)], *ONE[1:]])
    assert inside[0] == apart[0]
    for one, other in zip(inside[1:], apart[1:]):
        assert other - one == Counter(rope_rows=1) + Counter(norm_rows=1 if heads.rot else 0)
        assert not one - other
        assert one["rope_append_rows"] == 1


@pytest.mark.parametrize("heads", [OF_HEAD["three norms"], OF_ONE["128"]], ids=["wide", "narrow"])
def test_other_steps_have_their_norms_as_before(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, heads: Heads
) -> None:
    """Prompts, several sequences, and both together."""
    parts = [[(0, 0, 20)], [(0, 20, 1), (6, 40, 1)], [(0, 21, 1), (6, 41, 3)], [(0, 22, 2)]]
    inside, apart = both_ways(backend, monkeypatch, heads, parts)
    assert inside == apart
    assert all(names["head_norms"] == 1 for names in inside)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_a_cache_of_codes_has_its_norms_before_the_append(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, kv: KVType
) -> None:
    for heads in (Heads(64, norms=3), Heads(32, norms=2, borrows=True)):
        inside, apart = both_ways(backend, monkeypatch, heads, ONE[1:3], replace(LONGER, kv_cache=kv))
        assert inside == apart
        assert all(names["head_norms"] == names["rope_append_rows"] == 1 for names in inside)


def test_deterministic_steps_have_their_norms_as_before(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(LONGER, deterministic=True)
    inside, apart = both_ways(backend, monkeypatch, OF_HEAD["three norms"], ONE[1:3], limits)
    assert inside == apart
    assert all(names["norm_rows"] == 3 for names in inside)


@pytest.mark.parametrize(
    ("keeps", "norms", "launched"),
    [(None, 3, {}), (2, 2, {"norm_rows": 1}), (1, 1, {"norm_rows": 2}), (0, 0, {"head_norms": 1})],
)
def test_a_norm_that_is_a_result_has_a_launch(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, keeps: int | None, norms: int, launched: dict[str, int]
) -> None:
    heads = replace(OF_HEAD["three norms"], keeps=keeps)
    made = heads.program()
    (some,) = left_to_attention(made.nodes, {v.id for v in made.outputs.values()}, "float16")
    assert len(some.norms) == norms
    assert [made.nodes[i].spec.groups for i in some.norms] == [4, 2, 2][:norms]
    (inside,), _ = both_ways(backend, monkeypatch, heads, ONE[2:3])
    assert {name: n for name, n in inside.items() if "norm" in name} == launched


def test_what_is_left_to_an_attention() -> None:
    made = OF_HEAD["three norms"].program()
    (some,) = left_to_attention(made.nodes, set(), "float16")
    assert [made.nodes[i].op.name for i in some.nodes] == ["norm"] * 3 + ["rope_append"]
    assert [made.nodes[i].inputs[1].name for i in some.norms] == ["gain0", "gain1", "gain2"]  # type: ignore[union-attr]
    assert left_to_attention(made.nodes, set(), "float32") == [replace(some, norms=())]
    assert left_to_attention(made.nodes, {made.nodes[some.rope].outputs[0].id}, "float16") == []
    found = fuse.find(made.nodes, "float16", set(), left=[some])
    assert [sorted(f.parts) for f in found] == [sorted(some.norms)] * 2
    borrowed = Heads(256, norms=2, borrows=True).program()
    (some,) = left_to_attention(borrowed.nodes, set(), "float16")
    assert [borrowed.nodes[i].op.name for i in some.of_one] == ["norm", "rope"]
    assert left_to_attention(borrowed.nodes, set(), "float32") == []


def test_norms_that_differ_are_not_left() -> None:
    for change in ({"eps": 1e-6}, {"k": 128, "groups": 4}, {"out": "f32"}):
        made = OF_HEAD["three norms"].program()
        (some,) = left_to_attention(made.nodes, set(), "float16")
        nodes = [replace(n, spec=replace(n.spec, **change)) if i == some.norms[1] else n for i, n in enumerate(made.nodes)]
        (other,) = left_to_attention(nodes, set(), "float16")
        assert other.norms == some.norms[:1]


def test_which_steps_are_of_one_sequence() -> None:
    one = Batch(1, 1, 1, True, False, 4)
    assert of_one(one)
    others = (replace(one, deep=True), replace(one, T=2, S=2), replace(one, T=2, decode=False, prefill=True))
    assert not any(map(of_one, others))
