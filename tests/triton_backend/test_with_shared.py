"""One row's shared expert with a gate: its logit is one more of the router's, its product stands beside the experts'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quarrel.gguf import GGMLType
from quarrel.ops.contract import RawWeight, WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import add, linear
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec, RouteSpec, expert_down, expert_up, route
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.ops.reference import run_program
from quarrel.triton_backend import fuse
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.experts import fusions
from quarrel.triton_backend.experts import route as router
from quarrel.triton_backend.step import TritonStep
from tests.triton_backend.test_fuse import FRESH, launched, ref
from tests.triton_backend.test_joined import EXPERTS, USED, K, N, program
from tests.triton_backend.test_step import LIMITS, VOCAB
from tests.triton_backend.test_step import Weights as Drawn

ONE, _ = FRESH
LAYER = [
    "norm", "linear", "route", "expert_up", "expert_down", "linear", "linear", "gated", "linear", "gated", "linear_add",
    "add",
]  # fmt: skip


class Weights(Drawn):
    """Gates' logits so many times as large."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def raw(self, ref: WeightRef) -> RawWeight:
        drawn = super().raw(ref)
        if ref.name != "rate":
            return drawn
        return RawWeight(drawn.type, (drawn.dense() * np.float32(self._factor)).view(np.uint8), drawn.k)


def fused(made: Program, kept: set[int] | None = None) -> list[list[str]]:
    """What is computed together with both kinds of experts, in steps of one row."""
    found = fuse.find(made.nodes, "float16", {made.outputs["hidden"].id} if kept is None else kept)
    names = [[made.nodes[i].op.name for i in sorted(f.parts)] for f in found if f.rows == 1]
    return [part for part in names if {"expert_up", "linear_add"} <= set(part)]


@pytest.mark.parametrize("columns", [4096, 64])
@pytest.mark.parametrize("factor", [1.0, 1e4, -1e4, 1e30], ids=str)
def test_a_gate_is_that_of_the_reference(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, factor: float, columns: int
) -> None:
    """Of any size, and of rows that are no whole tiles."""
    monkeypatch.setattr(router, "_ALL_COLUMNS", columns)
    made, weights = program(2, gates=True, rated=True), Weights(factor)
    wanted = run_program(made, weights, [], ONE)["hidden"]
    step = backend.compile(made, weights, LIMITS, "float16")
    assert isinstance(step, TritonStep)
    assert rel_error(step(ONE, "hidden").hidden, wanted) <= 5e-3  # type: ignore[arg-type]
    (counts,) = step.expert_counts().values()
    assert len(counts) == EXPERTS
    assert counts.sum() == USED
    step.close()


def test_a_layer_of_one_row_is_three_launches(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    made, names = program(1, gates=True, rated=True), []
    assert fused(made) == [LAYER]
    for together in (True, False):
        if not together:
            monkeypatch.setattr(fusions, "with_shared", lambda *_: None)
        step = backend.compile(made, Drawn(), LIMITS, "float16")
        assert isinstance(step, TritonStep)
        names.append(launched(step, 1)[1:])
        step.close()
    ours, alone = ([n for n in part if n not in ("gather", "norm_rows")] for part in names)
    assert ours == ["route_one", "up_with_shared", "down_with_shared"]
    assert len(alone) > 2 * len(ours)


def test_what_is_not_taken_together() -> None:
    made = program(1, gates=True, rated=True)
    rate = next(n for n in made.nodes if n.op.name == "linear" and n.spec.n == 1).outputs[0]
    assert not fused(made, {rate.id})
    # The router's launch reads float32, and it has to be there.
    assert not fused(program(1, gates=True, rated=True, rate_type=GGMLType.F16))
    assert not fused(program(1, gates=True, rated=True, router_type=GGMLType.F16))
    # Without a gate it does not matter.
    assert fused(program(1, gates=True, router_type=GGMLType.F16)) == [[*LAYER[3:8], *LAYER[10:]]]


def normed(keeps: bool = False) -> Program:
    """Experts whose sum has a norm of its own before the stream, as Gemma 4's, with gains."""
    b = Builder()
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, K))
    x, judged = (norm(b, NormSpec("rms", K, 1e-5), h, ref(name, GGMLType.F32, 1, K)) for name in ("gain", "other"))
    logits = linear(b, judged, ref("router", GGMLType.F32, EXPERTS, K), out="f32")
    gains = ref("gains", GGMLType.F32, 1, EXPERTS)
    ids, weights = route(b, RouteSpec(EXPERTS, USED, "softmax", gains=True), logits, None, gains)
    stacks = [ref(name, GGMLType.Q5_0, EXPERTS * N, K) for name in ("gate", "up")]
    y = expert_up(b, ExpertUpSpec(GGMLType.Q5_0, EXPERTS, USED, N, K, "gelu_tanh"), x, ids, *stacks)
    down = ref("down", GGMLType.Q4_0, EXPERTS * K, N)
    y = expert_down(b, ExpertDownSpec(GGMLType.Q4_0, EXPERTS, USED, K, N), y, ids, weights, down)
    h = add(b, h, norm(b, NormSpec("rms", K, 1e-5), y, ref("gain", GGMLType.F32, 1, K)))
    last = norm(b, NormSpec("rms", K, 1e-5, out="f32"), h, ref("gain", GGMLType.F32, 1, K))
    outputs = {"hidden": gather_rows(b, last, b.input("out_rows"))}
    return b.program(**outputs, **({"sum": y} if keeps else {}))


def test_experts_before_a_norm_choose_themselves(backend: TritonBackend) -> None:
    made = normed()
    found = fuse.find(made.nodes, "float16", {made.outputs["hidden"].id})
    names = [[made.nodes[i].op.name for i in sorted(f.parts)] for f in found if f.rows == 1]
    assert ["norm", "linear", "route", "expert_up", "expert_down"] in names
    other = normed(keeps=True)
    found = fuse.find(other.nodes, "float16", {v.id for v in other.outputs.values()})
    assert not any(other.nodes[i].op.name == "expert_down" for f in found for i in f.parts)
    step = backend.compile(made, Drawn(), LIMITS, "float16")
    assert isinstance(step, TritonStep)
    chooses, go = [], step._plan.launch

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        chooses.extend([options["CHOOSES"]] if kernel.__name__ == "route_one" else [])
        go(kernel, *args, **options)

    step._plan.launch = noted
    for inputs in FRESH:
        wanted = run_program(made, Drawn(), [], inputs)["hidden"]
        assert rel_error(step(inputs, "hidden").hidden, wanted) <= 5e-3  # type: ignore[arg-type]
    assert chooses == [False]
    (counts,) = step.expert_counts().values()
    assert counts.sum() == 6 * USED
    step.close()
