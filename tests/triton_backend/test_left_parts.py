"""Norms that add the parts of K that a map before them left: their kernels, whom that joins, and whole steps.

The ring, which leaves parts, needs a GPU; here a map by other kernels stands for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from quarrel.gguf import GGMLType
from quarrel.ops.activation import GatedSpec, gated
from quarrel.ops.contract import rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import add, linear, linear_add, norm_gate_up, norm_linear
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec, RouteSpec, expert_down, expert_up, route
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.elementwise import norm as norms
from quarrel.triton_backend.elementwise import ring_x, wgmma_x
from quarrel.triton_backend.experts.experts import mix_pairs
from quarrel.triton_backend.linear import kernels, left_parts, tiles
from quarrel.triton_backend.linear.left_parts import MOST_ROWS, Kind, LeftParts, Parts, left_to_norms
from quarrel.triton_backend.linear.maps import Maps, Serves
from quarrel.triton_backend.linear.matmul import Epilogue
from quarrel.triton_backend.linear.ring import add_parts
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.kernel import Kernel
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv, launch
from quarrel.triton_backend.runtime.site import Batch, Site
from quarrel.triton_backend.step import TritonStep
from tests.triton_backend.test_fuse import launches, ref
from tests.triton_backend.test_step import LIMITS, VOCAB, Reference, Weights, batch

DEVICE = "cpu" if INTERPRETED else "cuda"
WIDTH = 256
ORDERS: dict[str, tuple[Any, dict[str, int], int]] = {
    "rows": (norms.norm_rows, {}, 5),
    "ring": (ring_x.norm_arranged, {"KP": 768}, 5),
    "fragments": (norms.norm_arranged, {}, 8),
    "wgmma": (wgmma_x.norm_arranged, {"BT": 64}, 64),
}
"""By where a norm puts its rows: the kernel, its constants, and its programs for five rows."""


@pytest.mark.parametrize("kind", ["parts", "biased", "shares"])
@pytest.mark.parametrize("parts", [1, 3, 8])
@pytest.mark.parametrize("order", ORDERS)
def test_a_norm_adds_what_is_left_as_a_launch_before_it_does(order: str, parts: int, kind: Kind) -> None:
    kernel, shape, programs = ORDERS[order]
    k = 640 if order == "wgmma" else 608
    experts = kind == "shares"
    sums = torch.randn(*((5, parts, k) if experts else (parts, 5, k)), device=DEVICE)
    more, stream, gain = (torch.randn(*s, device=DEVICE) for s in ((5, parts) if experts else (k,), (5, k), (k,)))
    made = []
    for inside in (True, False):
        x, to = torch.full((5, k), float("nan"), device=DEVICE), torch.full((64, 768), float("nan"), device=DEVICE).half()
        left, constants = Parts(sums, more, stream, 5 * k, 0.5), {"LEFT": kind, "PARTS": parts}
        if not inside:
            if experts:
                launch(
                    mix_pairs, (5, cdiv(k, 256)), x, sums, more, stream, 0.5, x, k, USED=parts, ADD=True, RATED=False,
                    C=256, early=False,
                )  # fmt: skip
            else:
                launch(
                    add_parts, (5, cdiv(k, 256)), x, sums, Epilogue(more, x, stream), 5 * k, 0.5, k, PARTS=parts,
                    BIAS=kind == "biased", ADD=True, C=256, early=False,
                )  # fmt: skip
            left, constants = LeftParts().take(x)
        if order == "rows":
            rest = (x, gain, gain, x, to, left, 5, k, 1e-5, 1.0, 1.0)
            launch(kernel, (programs,), to, *rest, **constants, LAYER=False, ADDS=False, R=1, C=1024, early=False)
        else:
            rest = (x, gain, left, 5, 1e-5)
            launch(kernel, (programs,), to, *rest, **constants, **shape, K=k, C=1024, early=False)
        made.append((x, to))
    (x, to), (wanted_x, wanted) = made
    near = 0.0 if INTERPRETED else 2e-3  # of a GPU's products and sums some are one operation
    torch.testing.assert_close(x, wanted_x, rtol=near, atol=near)
    assert torch.equal(to.isnan(), wanted.isnan())
    torch.testing.assert_close(to.nan_to_num(), wanted.nan_to_num(), rtol=near, atol=near)
    assert not to.isnan().all()


def stream_of(reads: str) -> Program:
    """Two layers of two maps onto the stream each; `reads` says what reads the stream between them."""
    b = Builder()
    spec, gain = NormSpec("rms", WIDTH, 1e-5), ref("gain", GGMLType.F32, 1, WIDTH)
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, WIDTH))
    streams = {}
    for layer in ("a", "b"):
        (x,) = norm_linear(b, spec, h, [gain], [(ref(layer + "v", GGMLType.Q4_0, WIDTH, WIDTH), None)])
        bias = ref(layer + "bias", GGMLType.F32, 1, WIDTH)
        h = first = linear_add(b, h, x, ref(layer + "o", GGMLType.Q8_0, WIDTH, WIDTH), bias)
        maps = [ref(layer + name, GGMLType.Q4_0, 64, WIDTH) for name in ("gate", "up")]
        if reads == "norm":
            x = norm(b, spec, h, gain)
            y = gated(b, GatedSpec("silu", 64), linear(b, x, maps[0]), linear(b, x, maps[1]))
        elif reads == "beside":
            y = norm_gate_up(b, spec, streams["a"] if layer == "b" else h, [gain], (maps[0], None), (maps[1], None), "silu")
        else:
            y = norm_gate_up(b, spec, h, [gain], (maps[0], None), (maps[1], None), "silu")
        h = linear_add(b, h, y, ref(layer + "down", GGMLType.Q4_0, WIDTH, 64))
        streams[layer] = first
        if reads == "experts" and layer == "a":
            x = norm(b, spec, h, gain)
            logits = linear(b, x, ref("router", GGMLType.F32, 5, WIDTH), None, "f32")
            ids, weights = route(b, RouteSpec(5, 2, "softmax", True, 1.5, False), logits)
            stacks = [ref(name, GGMLType.Q5_0, 5 * 64, WIDTH) for name in ("gates", "ups")]
            y = expert_up(b, ExpertUpSpec(GGMLType.Q5_0, 5, 2, 64, WIDTH, "silu"), x, ids, *stacks)
            down = ref("downs", GGMLType.Q5_0, 5 * WIDTH, 64)
            h = add(b, h, expert_down(b, ExpertDownSpec(GGMLType.Q5_0, 5, 2, WIDTH, 64), y, ids, weights, down), 0.5)
    last = NormSpec("rms", WIDTH, 1e-5, out="f32")
    hidden = norm(b, last, gather_rows(b, h, b.input("out_rows")), gain)
    return b.program(hidden=hidden, **({"stream": streams["a"]} if reads == "kept" else {}))


@pytest.mark.parametrize(("reads", "joined"), [("maps", 3), ("norm", 3), ("kept", 2), ("beside", 1), ("experts", 4)])
def test_whose_parts_a_norm_adds(reads: str, joined: int) -> None:
    """Not those of a result, nor where another norm reads the stream beside the first one's results."""
    made = stream_of(reads)
    found = left_to_norms(made.nodes, {v.id for v in made.outputs.values()})
    assert len(found) == joined
    for i, at in found:
        assert made.nodes[i].op.name in ("linear_add", "add")
        assert made.nodes[at].inputs[0] is made.nodes[i].outputs[0]


def stand_in(asked: list[int]) -> Kernel[Maps, Serves]:
    """Maps onto a stream in two parts, a quarter and the rest, by exact tiles."""

    def declines(site: Site, maps: Maps) -> str | None:
        return None if maps.left is not None else "no norm reads this first"

    def build(site: Site, maps: Maps) -> Serves:
        n, left = maps.weights[0].n, maps.left
        whole, sums = Slot(torch.empty(0)), Slot(torch.empty(0))
        whole.tensor, sums.tensor = (torch.full((m * MOST_ROWS * n,), float("nan"), device=DEVICE) for m in (1, 2))
        product = tiles.build(site, replace(maps, ys=[whole], biases=[None], residual=None, alpha=1.0, left=None))
        residual, bias, y = maps.residual, maps.biases[0], maps.ys[0]
        assert residual is not None
        assert left is not None

        def run(batch: Batch) -> None:
            count = batch.count(maps.axis)
            asked.append(count)
            product.run(batch)
            size = count * n
            sums.tensor[:size] = whole.tensor[:size] * 0.25
            sums.tensor[size : 2 * size] = whole.tensor[:size] - sums.tensor[:size]
            y.tensor[:size] = float("nan")  # the norm writes it
            parts = Parts(sums.tensor, y.tensor if bias is None else bias, residual.tensor, size, maps.alpha)

            def add() -> None:
                more = Epilogue(parts.bias, y.tensor, residual.tensor)
                site.launch(
                    add_parts, (count, 1), y.tensor, sums.tensor, more, size, maps.alpha, n, PARTS=2,
                    BIAS=bias is not None, ADD=True, C=WIDTH, early=False,
                )  # fmt: skip

            left.leave(parts, "parts" if bias is None else "biased", 2, add)

        return Serves(run, 2, 20)

    return Kernel("stand-in", declines, build)


@pytest.mark.parametrize("reads", ["maps", "norm", "kept", "beside", "experts"])
def test_steps_of_some_rows_leave_parts_and_others_do_not(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    made, asked = stream_of(reads), list[int]()
    monkeypatch.setattr(kernels, "KERNELS", (stand_in(asked), *kernels.KERNELS))
    monkeypatch.setattr(left_parts, "LEAST_ROWS", 2)
    step, reference = backend.compile(made, Weights(), LIMITS, "float16"), Reference(made)
    assert isinstance(step, TritonStep)
    if INTERPRETED:
        step._plan.fill(255)
    ran = launches(step)
    found = len(left_to_norms(made.nodes, {v.id for v in made.outputs.values()})) - (reads == "experts")
    for tokens in (5, 1, 20, 21, 2):
        asked.clear()
        ran.clear()
        inputs = batch([(0, 0, tokens)], rows=list(range(tokens)), seed=tokens)
        assert rel_error(step(inputs, "hidden").hidden, reference(inputs)["hidden"]) <= 5e-3  # type: ignore[arg-type]
        if INTERPRETED:  # graphs repeat launches that nobody counts
            assert len(asked) == (found if 2 <= tokens <= 20 else 0)
            names = Counter(ran)
            assert names["add_parts"] == names["mix_pairs"] == names["add_flat"] == 0
    step.close()


def test_rows_for_which_parts_are_left() -> None:
    assert [rows for rows in (1, 8, 63, 64, 128, 129, 512) if left_parts.leaves(rows)] == [64, 128]


@pytest.mark.parametrize("fits", [True, False])
def test_where_parts_do_not_fit_a_launch_adds_them(fits: bool) -> None:
    left, ran = LeftParts(), list[str]()
    x, sums = torch.zeros(4), torch.ones(4)
    parts = Parts(sums, x, x, 4, 1.0)
    left.leave(parts, "biased", 3, lambda: ran.append("add"))
    taken, constants = left.take(x, fits)
    assert (taken is parts, constants) == (fits, {"LEFT": "biased", "PARTS": 3} if fits else {"LEFT": "", "PARTS": 0})
    assert ran == ([] if fits else ["add"])
    assert left.take(x)[1]["PARTS"] == 0  # once
    left.leave(parts, "biased", 3, lambda: ran.append("add"))
    left.clear()
    assert left.take(x)[1]["PARTS"] == 0
