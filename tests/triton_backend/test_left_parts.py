"""Norms that add the parts of K that a map before them left: their kernels, whom that joins, and whole steps.

The ring, which leaves parts, needs a GPU; here a map by other kernels stands for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quarrel.gguf import GGMLType
from quarrel.ops.activation import GatedSpec, gated
from quarrel.ops.contract import rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import linear, linear_add, norm_gate_up, norm_linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.triton_backend.backend import TritonBackend
from quarrel.triton_backend.elementwise import norm as norms
from quarrel.triton_backend.elementwise import ring_x, wgmma_x
from quarrel.triton_backend.linear import kernels, tiles
from quarrel.triton_backend.linear.left_parts import MOST_ROWS, LeftParts, Parts, left_to_norms
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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("parts", [1, 3, 8])
@pytest.mark.parametrize("order", ORDERS)
def test_a_norm_adds_parts_as_a_launch_before_it_does(order: str, parts: int, biased: bool) -> None:
    kernel, shape, programs = ORDERS[order]
    k = 640 if order == "wgmma" else 608
    sums, bias, stream, gain = (torch.randn(*s, device=DEVICE) for s in ((parts, 5, k), (k,), (5, k), (k,)))
    made = []
    for inside in (True, False):
        x, to = torch.full((5, k), float("nan"), device=DEVICE), torch.full((64, 768), float("nan"), device=DEVICE).half()
        left, constants = Parts(sums, bias, stream, 5 * k, 0.5), {"PARTS": parts, "BIASED": biased}
        if not inside:
            more = Epilogue(bias, x, stream)
            launch(
                add_parts, (5, cdiv(k, 256)), x, sums, more, 5 * k, 0.5, k, PARTS=parts, BIAS=biased, ADD=True, C=256,
                early=False,
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
    assert x.isfinite().all()
    assert torch.equal(x, wanted_x)
    assert torch.equal(to.isnan(), wanted.isnan())
    torch.testing.assert_close(to.nan_to_num(), wanted.nan_to_num(), rtol=0.0 if INTERPRETED else 2e-3, atol=0.0)
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
    last = NormSpec("rms", WIDTH, 1e-5, out="f32")
    hidden = norm(b, last, gather_rows(b, h, b.input("out_rows")), gain)
    return b.program(hidden=hidden, **({"stream": streams["a"]} if reads == "kept" else {}))


@pytest.mark.parametrize(("reads", "joined"), [("maps", 3), ("norm", 3), ("kept", 2), ("beside", 1)])
def test_whose_parts_a_norm_adds(reads: str, joined: int) -> None:
    """Not those of a result, nor where another norm reads the stream beside the first one's results."""
    made = stream_of(reads)
    found = left_to_norms(made.nodes, {v.id for v in made.outputs.values()})
    assert len(found) == joined
    for i, at in found:
        assert made.nodes[i].op.name == "linear_add"
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

            left.leave(parts, 2, bias is not None, add)

        return Serves(run, 2, 20)

    return Kernel("stand-in", declines, build)


@pytest.mark.parametrize("reads", ["maps", "norm", "kept", "beside"])
def test_steps_of_some_rows_leave_parts_and_others_do_not(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    made, asked = stream_of(reads), list[int]()
    monkeypatch.setattr(kernels, "KERNELS", (stand_in(asked), *kernels.KERNELS))
    step, reference = backend.compile(made, Weights(), LIMITS, "float16"), Reference(made)
    assert isinstance(step, TritonStep)
    if INTERPRETED:
        step._plan.fill(255)
    ran = launches(step)
    found = len(left_to_norms(made.nodes, {v.id for v in made.outputs.values()}))
    for tokens in (5, 1, 20, 21, 2):
        asked.clear()
        ran.clear()
        inputs = batch([(0, 0, tokens)], rows=list(range(tokens)), seed=tokens)
        assert rel_error(step(inputs, "hidden").hidden, reference(inputs)["hidden"]) <= 5e-3  # type: ignore[arg-type]
        if INTERPRETED:  # graphs repeat launches that nobody counts
            assert len(asked) == (found if 2 <= tokens <= 20 else 0)
            assert Counter(ran)["add_parts"] == 0
    step.close()


@pytest.mark.parametrize("fits", [True, False])
def test_where_parts_do_not_fit_a_launch_adds_them(fits: bool) -> None:
    left, ran = LeftParts(), list[str]()
    x, sums = torch.zeros(4), torch.ones(4)
    parts = Parts(sums, x, x, 4, 1.0)
    add: Callable[[], None] = lambda: ran.append("add")  # noqa: E731
    left.leave(parts, 3, True, add)
    taken, constants = left.take(x, fits)
    assert (taken is parts, constants["PARTS"], constants["BIASED"]) == ((True, 3, True) if fits else (False, 0, False))
    assert ran == ([] if fits else ["add"])
    assert left.take(x)[1]["PARTS"] == 0  # once
    left.leave(parts, 3, True, add)
    left.clear()
    assert left.take(x)[1]["PARTS"] == 0
