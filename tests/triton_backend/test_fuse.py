"""What a step of few rows computes together gives what its nodes give by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from quarrel.gguf import GGMLType
from quarrel.ops.activation import CAP, GatedSpec, cap, gated, plain
from quarrel.ops.attention import AttentionSpec, RopeAppendSpec, attention, rope_append
from quarrel.ops.contract import ConstRef, WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import ADD, add, linear, linear_add, norm_gate_up
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec, Gate, RouteSpec, expert_down, expert_up, route
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import KVLayer, Program
from quarrel.ops.reference import run_program
from quarrel.ops.rope import RopeSpec, rope, rotated_by
from quarrel.ops.state import conv
from quarrel.ops.step import StepInputs
from quarrel.triton_backend import fuse, plan
from quarrel.triton_backend.attention import paged
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import route as router
from quarrel.triton_backend.fusion import Fusion, lifetimes
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.step import TritonStep
from tests.triton_backend.test_step import LIMITS, VOCAB, Reference, Weights, batch

K, EXPERTS, USED, N = 96, 5, 2, 32
ALONE = [
    ["norm", "linear", "route"],
    ["expert_down", "add"],
    ["norm", "linear", "route", "expert_up", "expert_down", "add"],
]
KINDS: dict[str, tuple[Gate, bool, bool, list[list[str]]]] = {
    "silu": (
        "softmax",
        True,
        True,
        [
            ["norm", "linear", "route"],
            ["linear", "linear", "gated"],
            ["linear", "linear", "gated"],
            ["norm", "linear", "route", "expert_up", "expert_down", "linear", "linear", "gated", "linear_add", "add"],
            ["expert_down", "linear_add", "add"],
        ],
    ),
    "relu2": (
        "sigmoid",
        True,
        True,
        [
            ["norm", "linear", "route"],
            ["linear", "plain"],
            ["norm", "linear", "route", "expert_up", "expert_down", "linear", "plain", "linear_add", "add"],
            ["expert_down", "linear_add", "add"],
        ],
    ),
    "silu alone": ("softmax", True, False, ALONE),
    "oai": ("softmax_topk", False, False, ALONE),
}
"""By the experts' activation: the gate, whether its weights are renormalised, a shared expert, what is fused."""


def ref(name: str, type: GGMLType, rows: int, k: int) -> WeightRef:
    return WeightRef(name, type, rows, k)


def program(kind: str) -> Program:
    gate, renormalise, shared, _ = KINDS[kind]
    kind = kind.split()[0]
    biased, both = kind == "oai", kind != "relu2"
    b = Builder()
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, K))
    x = norm(b, NormSpec("rms", K, 1e-5), h, ref("gain", GGMLType.F32, 1, K))
    logits = linear(
        b, x, ref("router", GGMLType.F32, EXPERTS, K), ref("rb", GGMLType.F32, 1, EXPERTS) if biased else None, "f32"
    )
    shift = ref("shift", GGMLType.F32, 1, EXPERTS) if gate == "sigmoid" else None
    ids, weights = route(b, RouteSpec(EXPERTS, USED, gate, renormalise, 2.5, shift is not None), logits, shift)
    names = ("gate", "up") if both else ("up",)
    stacks = [ref(n, GGMLType.Q5_0, EXPERTS * N, K) for n in names]
    biases = [ref(n + "_bias", GGMLType.F32, EXPERTS, N) for n in names if biased]
    y = expert_up(b, ExpertUpSpec(GGMLType.Q5_0, EXPERTS, USED, N, K, kind, both, biased), x, ids, *stacks, *biases)  # type: ignore[arg-type]
    down = ref("down", GGMLType.Q4_0, EXPERTS * K, N)
    y = expert_down(b, ExpertDownSpec(GGMLType.Q4_0, EXPERTS, USED, K, N), y, ids, weights, down)
    if shared:
        up = linear(b, x, ref("up_s", GGMLType.Q4_0, 64, K))
        if both:
            up = gated(b, GatedSpec("silu", 64), linear(b, x, ref("gate_s", GGMLType.Q4_0, 64, K)), up)
        else:
            up = plain(b, "relu2", up)
        y = linear_add(b, y, up, ref("down_s", GGMLType.Q8_0, K, 64))
    h = add(b, h, y, 0.22)
    hidden = norm(
        b, NormSpec("rms", K, 1e-5, out="f32"), gather_rows(b, h, b.input("out_rows")), ref("gain", GGMLType.F32, 1, K)
    )
    return b.program(hidden=hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_steps_match_the_reference(backend: TritonBackend, kind: str) -> None:
    made = program(kind)
    found = fuse.find(made.nodes, "float16", {made.outputs["hidden"].id})
    assert [[made.nodes[i].op.name for i in sorted(f.parts)] for f in found] == KINDS[kind][3]
    step, reference = backend.compile(made, Weights(), LIMITS, "float16"), Reference(made)
    counted = 0
    for tokens in (1, 5):
        inputs = replace(batch([(0, 0, tokens)], rows=list(range(tokens)), seed=3))
        assert rel_error(step(inputs, "hidden").hidden, reference(inputs)["hidden"]) <= 5e-3  # type: ignore[arg-type]
        counted += tokens
    assert isinstance(step, TritonStep)
    (counts,) = step.expert_counts().values()
    assert counts.sum() == counted * USED
    step.close()


def test_logits_of_few_and_of_many_tokens_are_those_of_the_reference(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router has a cut for each."""
    made = program("relu2")
    reference = Reference(made)
    for most in (15, 14):
        monkeypatch.setattr(router, "_SMALL_LOGITS", most)
        step = backend.compile(made, Weights(), LIMITS, "float16")
        cuts: list[tuple[int, int]] = []
        assert isinstance(step, TritonStep)
        go = step._plan.launch

        def noted(kernel: Any, *args: Any, go: Any = go, cuts: list[tuple[int, int]] = cuts, **told: Any) -> None:
            if kernel.__name__ == "gate_rows":
                cuts.append((told["R"], told["W"]))
            go(kernel, *args, **told)

        step._plan.launch = noted
        inputs = batch([(0, 0, 3)], rows=list(range(3)), seed=3)
        assert rel_error(step(inputs, "hidden").hidden, reference(inputs)["hidden"]) <= 5e-3  # type: ignore[arg-type]
        assert cuts == [(1 if most == 15 else 2, 128)]
        step.close()


def launched(step: TritonStep, tokens: int) -> list[str]:
    """The kernels of a step of so many tokens, in order."""
    names: list[str] = []
    go = step._plan.launch

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        names.append(kernel.__name__)
        go(kernel, *args, **options)

    step._plan.launch = noted
    step(batch([(0, 0, tokens)], rows=list(range(tokens)), seed=3), "hidden")
    step._plan.launch = go
    return names


def test_several_rows_group_once_and_add_where_they_sum(backend: TritonBackend) -> None:
    step = backend.compile(program("silu"), Weights(), LIMITS, "float16")
    assert isinstance(step, TritonStep)
    names = launched(step, 5)
    step.close()
    assert names.count("group_pairs") == INTERPRETED  # a GPU's ring has them in the order of experts already
    assert names.count("mix_pairs") == 1
    assert not {"add_flat", "gated_flat"} & set(names)


def test_a_value_that_is_a_result_is_not_passed_over() -> None:
    made = program("oai")
    logits = next(n for n in made.nodes if n.op.name == "linear").outputs[0]
    assert [f.last for f in fuse.find(made.nodes, "float16", {logits.id})] == [len(made.nodes) - 3]
    assert not fuse.find(made.nodes, "float32", set())


def test_lifetimes_reach_the_last_node() -> None:
    made = program("silu")
    fusions = fuse.find(made.nodes, "float16", set())
    until = lifetimes(fusions, made.nodes)
    for fusion in fusions:
        for i in fusion.parts:
            assert all(until[v.id] >= fusion.last for v in made.nodes[i].inputs if hasattr(v, "dims"))
    assert np.all(np.array(list(until.values())) < len(made.nodes))
    x = made.nodes[1].inputs[0]
    one, other = Fusion({1: None, 9: None}), Fusion({1: None, 4: None})
    assert lifetimes([one, other], made.nodes)[x.id] == 9  # type: ignore[union-attr]


def sandwich(kind: Literal["rms", "layer"], after: str, factor: float, keeps: bool = False) -> Program:
    """Norm behind a map, added to the stream, twice; what reads the stream is `after`."""
    b, n = Builder(), 96

    def gains(name: str) -> list[WeightRef]:
        return [ref(name + part, GGMLType.F32, 1, n) for part in ("gain", "bias")[: 2 if kind == "layer" else 1]]

    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, n))
    for half in ("a", "b"):
        maps = [ref(half + name, GGMLType.Q4_0, 64, n) for name in ("gate", "up")]
        if after == "maps":
            pre, gain = NormSpec("rms", n, 1e-6), ref(half + "pre", GGMLType.F32, 1, n)
            x = norm_gate_up(b, pre, h, [gain], (maps[0], None), (maps[1], None), "gelu_tanh")
        elif after == "columns":
            x = gated(b, GatedSpec("gelu_tanh", 64, width=n, start=24), linear(b, h, maps[0]), h)
        else:
            x = gated(b, GatedSpec("silu", 64), linear(b, h, maps[0]), linear(b, h, maps[1]))
        y = linear(b, x, ref(half + "down", GGMLType.Q8_0, n, 64))
        h = first = add(b, h, norm(b, NormSpec(kind, n, 1e-5), y, *gains(half)), 0.5)
        if factor != 1.0:
            h = cap(b, h, factor, 0.0)
    last = NormSpec("rms", n, 1e-5, out="f32")
    hidden = norm(b, last, gather_rows(b, h, b.input("out_rows")), ref("gain", GGMLType.F32, 1, n))
    return b.program(hidden=hidden, **({"stream": first} if keeps else {}))


def launches(step: TritonStep) -> list[str]:
    """Kernels that run from here on."""
    names, really = [], step._plan.launch

    def launch(kernel: Any, *args: Any, **told: Any) -> None:
        names.append(kernel.__name__)
        really(kernel, *args, **told)

    step._plan.launch = launch
    return names


def both_ways(
    backend: TritonBackend,
    monkeypatch: pytest.MonkeyPatch,
    made: Program,
    fusion: str,
    without: object,
    steps: Sequence[StepInputs],
) -> tuple[list[np.ndarray], list[Counter[str]]]:
    """Results and launches of each step with a fusion, then of each without; all are near the reference."""
    reference, outputs, names = Reference(made), [], []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(fuse, fusion, lambda *_: without)
        step = backend.compile(made, Weights(), LIMITS, "float16")
        assert isinstance(step, TritonStep)
        ran = launches(step)
        for inputs in steps:
            ran.clear()
            outputs.append(step(inputs, "hidden").hidden)
            names.append(Counter(ran))
            assert rel_error(outputs[-1], reference(inputs)["hidden"]) <= 5e-3
        step.close()
    return outputs, names


FRESH = [batch([(0, 0, tokens)], rows=list(range(tokens)), seed=3) for tokens in (1, 5)]


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("after", ["maps", "stream", "columns"])
@pytest.mark.parametrize("factor", [1.0, 0.75])
def test_a_norm_added_to_the_stream_is_one_launch_with_the_same_bits(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, kind: Literal["rms", "layer"], after: str, factor: float
) -> None:
    monkeypatch.setattr(fuse, "_own_gate", lambda *_: None)  # it is in the map behind it (`test_own_row.py`)
    outputs, names = both_ways(backend, monkeypatch, sandwich(kind, after, factor), "_normed", [], FRESH)
    one, five, one_alone, five_alone = names
    for together, alone in zip(outputs[:2], outputs[2:], strict=True):
        # A GPU's compiler makes one operation of a product and a sum where both are in one kernel.
        assert np.array_equal(together, alone) if INTERPRETED else rel_error(together, alone) < 1e-3
    # Of two norms, two sums and their factors, two launches are left.
    assert five_alone - five == {"add_flat": 2, **({} if factor == 1.0 else {"cap_flat": 2})}
    assert not five - five_alone
    if kind == "layer":
        assert one_alone - one == five_alone - five
        return
    if after == "columns":  # both are rounded where they are made, and the first half's stream by itself
        assert (one["gated_int8x2"], one["int8x2_rows"], five["gated_columns"]) == (2, 1, 2)
    # The second half's maps, or their rounding, begin with what the first half has left.
    assert one["norm_add_int8x2"] == 1
    gone = {"norm_rows": 1, "add_flat": 2, **({} if factor == 1.0 else {"cap_flat": 2})}
    assert one_alone - one == {**gone, **({"norm_int8x2_rows": 1} if after == "maps" else {"int8x2_rows": 1})}


def test_a_sum_that_is_a_result_is_written_before_its_factor() -> None:
    made = sandwich("rms", "maps", 0.75, keeps=True)
    kept = {v.id for v in made.outputs.values()}
    found = [f for f in fuse.find(made.nodes, "float16", kept) if made.nodes[f.last].op in (ADD, CAP)]
    assert [made.nodes[f.last].op.name for f in found] == ["cap", "add"]


@pytest.mark.parametrize(("factor", "width"), [(1.0, 96), (0.75, 160)])
def test_two_norms_whose_sum_is_normalised_have_no_launches(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, factor: float, width: int
) -> None:
    """Of one row, with the same bits; Gemma 4 has them behind its dense maps and its experts."""
    b = Builder()

    def normed(name: str, x: Any, **spec: Any) -> Any:
        return norm(b, NormSpec("rms", width, 1e-6, **spec), x, ref(name, GGMLType.F32, 1, width))

    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, width))
    one, other = (linear(b, h, ref(name, GGMLType.Q8_0, width, width)) for name in ("one", "other"))
    y = add(b, normed("gain_1", one, out="f32"), normed("gain_2", other))
    h = add(b, h, normed("gain_3", y), 0.5)
    if factor != 1.0:
        h = cap(b, h, factor, 0.0)
    gate, up = (ref(name, GGMLType.Q4_0, 64, width) for name in ("gate", "up"))
    pre, gain = NormSpec("rms", width, 1e-6), ref("gain_4", GGMLType.F32, 1, width)
    x = norm_gate_up(b, pre, h, [gain], (gate, None), (up, None), "silu")
    h = linear_add(b, h, x, ref("down", GGMLType.Q8_0, width, 64))
    made = b.program(hidden=gather_rows(b, h, b.input("out_rows")))
    outputs, names = both_ways(backend, monkeypatch, made, "_pair", None, FRESH)
    assert names[2] - names[0] == Counter(norm_rows=2)
    assert names[3] == names[1]
    for i in (0, 1):
        assert np.array_equal(outputs[i], outputs[i + 2])


def test_programs_of_float32_add_norms_by_themselves() -> None:
    made = sandwich("rms", "maps", 1.0)
    assert not fuse.find(made.nodes, "float32", set())


def normed_heads(*norms: tuple[int, int, float]) -> Program:
    """Norms beside each other, of so many heads of a width and an epsilon; each is added to the stream by a map."""
    b = Builder()
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, K))
    xs = [linear(b, h, ref(f"x{i}", GGMLType.Q4_0, n * k, K)) for i, (n, k, _) in enumerate(norms)]
    ys = [
        norm(b, NormSpec("rms", k, eps, n), x, ref(f"gain{i}", GGMLType.F32, 1, k))
        for i, (x, (n, k, eps)) in enumerate(zip(xs, norms))
    ]
    for i, (y, (n, k, _)) in enumerate(zip(ys, norms)):
        h = linear_add(b, h, y, ref(f"y{i}", GGMLType.F16, K, n * k))
    last = norm(b, NormSpec("rms", K, 1e-5, out="f32"), h, ref("gain", GGMLType.F32, 1, K))
    return b.program(hidden=gather_rows(b, last, b.input("out_rows")))


@pytest.mark.parametrize(
    ("norms", "launched"),
    [
        ([(1, 48, 1e-5), (9, 48, 1e-5), (70, 48, 1e-5)], {"norm_rows": 3}),
        ([(4, 32, 1e-5), (2, 32, 1e-5)], {"norm_rows": 2}),
        ([(4, 32, 1e-5), (2, 64, 1e-5), (2, 64, 1e-5)], {"norm_rows": 2}),
        ([(4, 32, 1e-5), (2, 32, 1e-6)], {}),
    ],
)
def test_norms_beside_each_other_are_one_launch_with_the_same_bits(
    backend: TritonBackend,
    monkeypatch: pytest.MonkeyPatch,
    norms: list[tuple[int, int, float]],
    launched: dict[str, int],
) -> None:
    outputs, names = both_ways(backend, monkeypatch, normed_heads(*norms), "_head_norms", [], FRESH)
    for i in (0, 1):
        assert np.array_equal(outputs[i], outputs[i + 2])
        assert names[i + 2] - names[i] == launched
        assert names[i] - names[i + 2] == ({"head_norms": 1} if launched else {})


def test_a_norm_of_a_norm_waits_for_it() -> None:
    b = Builder()
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, K))
    x, y = (linear(b, h, ref(name, GGMLType.Q4_0, 32, K)) for name in "xy")
    first = norm(b, NormSpec("rms", 32, 1e-5), x, ref("gain", GGMLType.F32, 1, 32))
    second = norm(b, NormSpec("rms", 32, 1e-5), first, ref("gain", GGMLType.F32, 1, 32))
    third = norm(b, NormSpec("rms", 32, 1e-5), y, ref("gain", GGMLType.F32, 1, 32))
    out = linear_add(b, linear_add(b, h, second, ref("a", GGMLType.F16, K, 32)), third, ref("b", GGMLType.F16, K, 32))
    made = b.program(hidden=out)
    found = [sorted(f.parts) for f in fuse.find(made.nodes, "float16", {out.id})]
    norms = [i for i, node in enumerate(made.nodes) if node.op.name == "norm"]
    assert found == [norms[1:]]


@pytest.mark.parametrize(
    ("spec", "rotated"),
    [
        (RopeSpec("neox", 5, 64, 64, 1.25), 1),
        (RopeSpec("norm", 3, 32, 32), 1),
        (RopeSpec("neox", 2, 64, 24, 1.25, 3), 0),
        (RopeSpec("neox", 3, 48, 48), 0),
    ],
)
def test_heads_are_normalised_where_they_are_rotated_with_the_same_bits(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, spec: RopeSpec, rotated: int
) -> None:
    b = Builder()
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, K))
    x = linear(b, h, ref("x", GGMLType.Q4_0, spec.width, K))
    x = norm(b, NormSpec("rms", spec.head_dim, 1e-5, spec.n_heads), x, ref("gain", GGMLType.F32, 1, spec.head_dim))
    freq = ConstRef("freq", tuple(1000.0 ** (-2.0 * (i % spec.half) / spec.n_rot) for i in range(spec.n_freq)))
    y = rope(b, spec, x, rotated_by(b, spec), freq)
    h = linear_add(b, h, y, ref("y", GGMLType.F16, K, spec.width))
    made = b.program(hidden=gather_rows(b, h, b.input("out_rows")))
    steps = [batch([(0, past, tokens)], rows=list(range(tokens)), seed=3) for past, tokens in ((9, 1), (0, 5))]
    if spec.axes > 1:
        places = [np.stack([s.positions // (1 + axis) for axis in range(spec.axes)], 1) for s in steps]
        steps = [replace(s, places=p.astype(np.int32)) for s, p in zip(steps, places, strict=True)]
    outputs, names = both_ways(backend, monkeypatch, made, "_rotated", None, steps)
    for i in (0, 1):
        assert np.array_equal(outputs[i], outputs[i + 2])
        assert names[i + 2] - names[i] == Counter(norm_rows=rotated)


def test_a_tokens_heads_of_512_values_are_rounded_where_they_are_made(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, dim = Builder(), 512
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, K))
    q, k, v = (linear(b, h, ref(name, GGMLType.Q4_0, n * dim, K)) for name, n in (("q", 2), ("k", 1), ("v", 1)))
    cache, turns = b.cache(KVLayer(1, dim)), RopeSpec("neox", 2, dim, dim)
    freq = ConstRef("freq", tuple(1000.0 ** (-2.0 * i / dim) for i in range(dim // 2)))
    q = rope_append(b, RopeAppendSpec(turns, replace(turns, n_heads=1)), q, k, v, freq, cache)
    y = attention(b, AttentionSpec(2, 1, dim, 0.05), q, cache)
    h = linear_add(b, h, y, ref("o", GGMLType.Q8_0, K, 2 * dim))
    made, outputs, rounded = b.program(hidden=gather_rows(b, h, b.input("out_rows"))), [], []
    for alone in (False, True):
        if alone:
            monkeypatch.setattr(Plan, "int8x2_target", lambda *_: (None, True))
        step = backend.compile(made, Weights(), LIMITS, "float16")
        assert isinstance(step, TritonStep)
        step(batch([(0, 0, 20)], seed=1), "hidden")
        ran = launches(step)
        outputs.append(step(batch([(0, 20, 1)], seed=3), "hidden").hidden)
        rounded.append(ran.count("int8x2_rows"))
        step.close()
    assert rel_error(outputs[0], outputs[1]) < 1e-3  # type: ignore[arg-type]
    assert rounded[1] - rounded[0] == 1


@pytest.mark.parametrize(("type", "rounds"), [(GGMLType.Q8_0, 1), (GGMLType.F16, 0)], ids=["integers", "floats"])
def test_a_gate_behind_attention_leaves_one_row_as_int8x2(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, type: GGMLType, rounds: int
) -> None:
    """With the same bits, if the map behind it reads it so; as in Qwen 3.5."""
    b, dim, heads = Builder(), 32, 4
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, K))
    widths = {"q": heads * dim, "k": 2 * dim, "v": 2 * dim, "gate": heads * dim}
    q, k, v, gate = (linear(b, h, ref(name, GGMLType.Q4_0, width, K)) for name, width in widths.items())
    cache, turns = b.cache(KVLayer(2, dim)), RopeSpec("neox", heads, dim, dim)
    freq = ConstRef("freq", tuple(1000.0 ** (-2.0 * i / dim) for i in range(dim // 2)))
    q = rope_append(b, RopeAppendSpec(turns, replace(turns, n_heads=2)), q, k, v, freq, cache)
    y = gated(b, GatedSpec("sigmoid", heads * dim), gate, attention(b, AttentionSpec(heads, 2, dim, 0.2), q, cache))
    made = b.program(hidden=gather_rows(b, linear_add(b, h, y, ref("o", type, K, heads * dim)), b.input("out_rows")))
    steps = [batch([(0, 0, 5)]), batch([(0, 5, 1)], seed=3)]
    outputs, names = both_ways(backend, monkeypatch, made, "_rounded", None, steps)
    assert [names[i].get("gated_int8x2", 0) for i in range(4)] == [0, rounds, 0, 0]
    assert names[3]["int8x2_rows"] - names[1]["int8x2_rows"] == rounds
    for i in (0, 1):
        assert np.array_equal(outputs[i], outputs[i + 2])


@pytest.mark.parametrize(("channels", "width"), [(96, 3), (288, 4), (64, 2)])
def test_a_convolution_between_two_gates_is_one_launch_with_the_same_bits(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, channels: int, width: int
) -> None:
    b = Builder()
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, K))
    before, after, u = (linear(b, h, ref(name, GGMLType.Q4_0, channels, K)) for name in ("before", "after", "u"))
    product, state = GatedSpec("identity", channels), b.state(width - 1, channels)
    bias = ref("bias", GGMLType.F32, 1, channels) if width == 4 else None
    y = conv(b, gated(b, product, before, u), ref("taps", GGMLType.F32, channels, width), bias, state, "identity")
    h = linear_add(b, h, gated(b, product, after, y), ref("out", GGMLType.Q8_0, K, channels))
    made = b.program(hidden=gather_rows(b, h, b.input("out_rows")))
    parts = [
        [(0, 0, 2), (6, 0, 3)],  # a prompt as short as the state
        [(0, 2, 1)],
        [(0, 3, 1), (6, 3, 1), (12, 0, 1)],  # the last begins here
        [(6, 4, 1), (12, 1, 9)],
        [(12, 10, 1)],
    ]
    steps = [
        replace(batch(p, seed=i), state_slots=np.array([first // 6 for first, _, _ in p], np.int32))
        for i, p in enumerate(parts)
    ]
    reference = [np.zeros((3, width - 1, channels), np.float32)]
    found = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(fuse, "_short_conv", lambda *_: None)
        step = backend.compile(made, Weights(), LIMITS, "float16")
        assert isinstance(step, TritonStep)
        for inputs in steps:
            ran = launches(step)
            hidden = step(inputs, "hidden").hidden
            if together:
                want = run_program(made, Weights(), [], inputs, reference)["hidden"]
                assert rel_error(hidden, want) <= 5e-3
            found.append((hidden, Counter(ran)))
        step.close()
    for i, (inputs, (one, fused), (other, apart)) in enumerate(zip(steps, found[: len(steps)], found[len(steps) :])):
        assert np.array_equal(one, other), i
        single, decodes = len(inputs.ids) == 1, max(np.diff(inputs.query_start)) == 1
        assert fused["gated_conv_step"] == decodes
        want = Counter(gated_flat=2, conv_step=1) + Counter(int8x2_rows=1 if single else 0) if decodes else Counter()
        assert apart - fused == want


@pytest.mark.parametrize(
    ("style", "dim", "window", "rot", "axes"),
    [
        ("neox", 256, 0, 256, 1),
        ("norm", 256, 24, 256, 1),
        ("neox", 512, 0, 512, 1),
        ("neox", 256, 0, 64, 3),
        ("norm", 256, 0, 96, 1),
        ("neox", 256, 24, 256, 3),
    ],
)
def test_one_sequence_of_wide_heads_rotates_and_appends_itself(
    backend: TritonBackend,
    monkeypatch: pytest.MonkeyPatch,
    style: Literal["norm", "neox"],
    dim: int,
    window: int,
    rot: int,
    axes: int,
) -> None:
    """Whole heads and some of their columns, by one axis and by several, with the bits that a launch of its own has."""
    b = Builder()
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, K))
    q, k, v = (linear(b, h, ref(name, GGMLType.Q4_0, n * dim, K)) for name, n in (("q", 2), ("k", 1), ("v", 1)))
    cache, turns = b.cache(KVLayer(1, dim)), RopeSpec(style, 2, dim, rot, 1.1, axes=axes)
    of_pairs = [1000.0 ** (-2.0 * i / rot) for i in range(rot // 2)]
    freq = ConstRef("freq", tuple(f if i % axes == axis else 0.0 for axis in range(axes) for i, f in enumerate(of_pairs)))
    q = rope_append(b, RopeAppendSpec(turns, replace(turns, n_heads=1)), q, k, v, freq, cache)
    y = attention(b, AttentionSpec(2, 1, dim, 0.05, window=window), q, cache)
    h = linear_add(b, h, y, ref("o", GGMLType.Q8_0, K, 2 * dim))
    made, found = b.program(hidden=gather_rows(b, h, b.input("out_rows"))), []

    def one(past: int, tokens: int, seed: int) -> StepInputs:
        inputs = batch([(0, past, tokens)], seed=seed)
        places = np.stack([inputs.positions // (1 + axis) for axis in range(axes)], 1).astype(np.int32)
        return replace(inputs, places=places) if axes > 1 else inputs

    for programs, alone in ((paged.HEAD_PROGRAMS, False), (0, False), (0, True)):
        monkeypatch.setattr(paged, "HEAD_PROGRAMS", programs)
        if alone:
            monkeypatch.setattr(plan, "left_to_attention", lambda *_: [])
        step = backend.compile(made, Weights(), LIMITS, "float16")
        assert isinstance(step, TritonStep)
        for past, tokens in ((0, 20), (20, 11)):
            step(one(past, tokens, past), "hidden")
        ran = launches(step)
        hidden = [step(one(31 + i, 1, 3 + i), "hidden").hidden for i in range(3)]
        (store,) = step._plan.caches
        found.append((Counter(ran), np.stack(hidden), store.k.clone(), store.v.clone()))
        step.close()
    (mine, got, *kept), (theirs, want, *others), (apart, rotated, *stored) = found
    ours = mine["attend_head"], theirs["attend_one"], apart["rope_append_rows"]
    assert ours == (3, 3, 3) if INTERPRETED else min(ours) > 0  # graphs repeat launches that nobody counts
    assert mine["rope_append_rows"] == theirs["rope_append_rows"] == 0
    assert rel_error(got, want) < 1e-3
    assert rel_error(want, rotated) < 1e-3
    for one_, other, third in zip(kept, others, stored):
        for same in (other, third):
            near = 0.0 if INTERPRETED else 2e-3  # of a GPU's products and sums some are one operation
            torch.testing.assert_close(one_, same, rtol=near, atol=near)
