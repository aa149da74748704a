"""Matvecs that make the row they multiply: the same bits as the launches that they replace, and who else is left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quarrel.gguf import GGMLType, GGUFFile
from quarrel.models import Tensors, assemble
from quarrel.ops import reference
from quarrel.ops.activation import LARGEST, Activation, GatedSpec, cap, gated
from quarrel.ops.contract import Case, Concrete, Value, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import LINEAR, NORM_LINEAR, LinearSpec, NormLinearSpec, add, linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.ops.registry import lower
from quarrel.triton_backend import fuse
from quarrel.triton_backend.backend import REGISTRY, TritonBackend
from quarrel.triton_backend.linear import own_row
from quarrel.triton_backend.run_op import bind
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.step import TritonStep
from tests.models.test_reference_logits import specify
from tests.paths import need_cases
from tests.triton_backend.cases import DEVICE
from tests.triton_backend.test_fuse import launches, ref
from tests.triton_backend.test_step import LIMITS, VOCAB, Reference, Weights, batch

STEPS = [batch([(0, 0, tokens)], rows=list(range(tokens)), seed=3) for tokens in (1, 5)]


def per_layer(
    type: str,
    n: int,
    each: int,
    activation: Activation = "gelu_tanh",
    bias: bool = False,
    factor: float = 1.0,
    **kept: bool,
) -> Program:
    """What Gemma 4 E has behind a layer's feed-forward, of two layers, `each` columns of `n`."""
    b, format = Builder(), GGMLType[type]
    h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, n))
    p = linear(b, h, ref("p", GGMLType.Q8_0, 3 * each, n), out="f32")
    results: dict[str, Value] = {}
    for layer in ("a", "b"):

        def gain(name: str, layer: str = layer) -> Any:
            return ref(layer + name, GGMLType.F32, 1, n)

        def biased(rows: int, layer: str = layer) -> Any:
            return ref(f"{layer}b{rows}", GGMLType.F32, 1, rows) if bias else None

        h = add(b, h, norm(b, NormSpec("rms", n, 1e-5), linear(b, h, ref("down", GGMLType.F16, n, n)), gain("post")), 0.5)
        if factor != 1.0:
            h = cap(b, h, factor, 0.0)
        results["stream"] = h
        gate = linear(b, h, ref(layer + "gate", format, each, n), biased(each))
        results["gated"] = y = gated(b, GatedSpec(activation, each, width=3 * each, start=each), gate, p)
        y = linear(b, y, ref(layer + "proj", format, n, each), biased(n))
        h = add(b, h, norm(b, NormSpec("rms", n, 1e-5, out="f32"), y, gain("last")))
    results = {name: v for name, v in results.items() if kept.get(name)}
    return b.program(hidden=gather_rows(b, h, b.input("out_rows")), **results)


def ran(backend: TritonBackend, made: Program, **limits: Any) -> tuple[list[np.ndarray], list[Counter[str]]]:
    """Results and launches of a step of one row and of five, in buffers full of NaN."""
    step, outputs, names = backend.compile(made, Weights(), replace(LIMITS, **limits), "float16"), [], []
    assert isinstance(step, TritonStep)
    going, reference = launches(step), Reference(made)
    for inputs in STEPS:
        step._plan.fill(255)
        going.clear()
        outputs.append(step(inputs, "hidden").hidden)
        names.append(Counter(going))
        assert rel_error(outputs[-1], reference(inputs)["hidden"]) <= 5e-3
    step.close()
    return outputs, names  # type: ignore[return-value]


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "_own_gate", lambda *_: None)


@pytest.mark.parametrize(
    ("type", "n", "each", "told"),
    [
        ("Q4_K", 1280, 256, {}),
        ("Q4_K", 256, 512, {"bias": True, "factor": 0.75}),
        ("Q6_K", 768, 256, {"activation": "silu"}),
        ("Q8_0", 96, 32, {}),
        ("Q8_0", 352, 96, {"bias": True}),
        ("Q5_0", 160, 160, {"factor": 0.75, "activation": "gelu_erf"}),
        ("Q5_K", 512, 256, {"activation": "sigmoid"}),
        ("MXFP4", 64, 32, {"activation": "identity"}),
        ("TQ2_0", 256, 256, {}),
    ],
)
def test_rows_made_in_registers_have_the_same_bits(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, type: str, n: int, each: int, told: dict[str, Any]
) -> None:
    made = per_layer(type, n, each, **told)
    outputs, names = ran(backend, made)
    apart(monkeypatch)
    alone, separately = ran(backend, made)
    for together, separate in zip(outputs, alone):
        # A GPU's compiler makes one operation of a product and a sum where both are in one kernel.
        assert np.array_equal(together, separate) if INTERPRETED else rel_error(together, separate) < 1e-3
    assert names[0] - separately[0] == Counter(gated_matvec=2)
    assert separately[0] - names[0] == Counter(gated_int8x2=2, matvec=2)
    assert names[1] == separately[1]


@pytest.mark.parametrize("kept", ["stream", "gated"])
def test_results_are_written(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    """A gate that is a result has its launch."""
    made = per_layer("Q4_K", 256, 256, **{kept: True})
    found = []
    for together in (True, False):
        if not together:
            apart(monkeypatch)
        step = backend.compile(made, Weights(), LIMITS, "float16")
        assert isinstance(step, TritonStep)
        step._plan.fill(255)
        going = launches(step)
        step(STEPS[0], "hidden")
        value = made.outputs[kept]
        found.append((Counter(going), step._plan.slot(value).tensor[: value.dims[1]].cpu().numpy()))  # type: ignore[misc]
        step.close()
    (names, got), (_, want) = found
    assert np.array_equal(got, want) if INTERPRETED else rel_error(got, want) < 1e-3
    assert np.isfinite(got).all()
    assert names["gated_matvec"] == (2 if kept == "stream" else 1)


@pytest.mark.parametrize(
    ("type", "limits", "most"), [("F16", {}, 1024), ("Q4_K", {"deterministic": True}, 1024), ("Q4_K", {}, 255)]
)
def test_others_are_left_alone(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, type: str, limits: dict[str, Any], most: int
) -> None:
    """Floats, deterministic steps, and gates of more columns."""
    monkeypatch.setattr(own_row, "MOST_GATED", most)
    _, names = ran(backend, per_layer(type, 256, 256), **limits)
    assert names[0]["gated_matvec"] == 0


@pytest.mark.parametrize(("arch", "variant"), [("gemma4_e", "q4_k_m"), ("gemma3n", "q4_0x")])
def test_models_have_them_in_each_layer(arch: str, variant: str) -> None:
    """Ten layers of Gemma 3n keep the largest gates only, of small models in the same way."""
    folder = need_cases(arch)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:
        spec = specify(file, folder, variant)
        made = assemble(spec, Tensors(file))
    nodes = [choice.node for choice in lower(made, REGISTRY)]
    found = fuse.find(nodes, "float16", {v.id for v in made.outputs.values()})
    firsts = Counter(nodes[f.first].op.name for f in found if nodes[f.last].op is LINEAR)
    more = sum(node.op is LARGEST for node in nodes)
    assert firsts - Counter(gated=more) == {"gated": len(spec.layers)}


def normed(k: int, type: str, n: int, bias: bool = False) -> tuple[NormLinearSpec, list[Concrete]]:
    spec = NormLinearSpec(NormSpec("rms", k, 1e-5), (LinearSpec(GGMLType[type], n, k, bias, "f32"),))
    assert NORM_LINEAR.make is not None
    return spec, list(NORM_LINEAR.make(Case(spec, {"T": 1}), np.random.default_rng(k)))


def run_map(spec: NormLinearSpec, given: Sequence[Concrete]) -> tuple[np.ndarray, list[str]]:
    """The result of NORM_LINEAR, and the kernels that were launched."""
    bound, names = bind(REGISTRY, DEVICE, NORM_LINEAR, spec, given, "float16"), list[str]()
    really = bound.plan.launch

    def launch(kernel: Any, *args: Any, **told: Any) -> None:
        names.append(kernel.__name__)
        really(kernel, *args, **told)

    bound.plan.launch = launch
    bound()
    return bound.plan.slots[bound.results[0].id].tensor.cpu().numpy().copy(), names


@pytest.mark.parametrize(
    ("k", "type", "n", "bias"),
    [(768, "Q4_K", 37, True), (1024, "Q6_K", 16, False), (608, "Q8_0", 19, True), (576, "MXFP4", 19, False),
     (512, "Q5_K", 17, False), (32, "Q5_0", 1, False)],
)  # fmt: skip
def test_a_norm_inside_its_map(monkeypatch: pytest.MonkeyPatch, k: int, type: str, n: int, bias: bool) -> None:
    """The factor follows the product, so bits differ by the rounding of scales."""
    spec, given = normed(k, type, n, bias)
    inside, names = run_map(spec, given)
    monkeypatch.setattr(own_row, "MOST_NORMED", 0)
    apart_, separately = run_map(spec, given)
    assert (names, separately) == (["norm_matvec"], ["norm_int8x2_rows", "matvec"])
    (want,) = reference.run_op(NORM_LINEAR, spec, given)
    size = np.abs(want).max()
    assert np.abs(inside - want.reshape(-1)).max() <= 5e-4 * size
    assert np.abs(inside - apart_).max() <= 2e-4 * size


@pytest.mark.parametrize("type", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("what", ["one is huge", "all are zero", "a block is zero", "nan", "inf"])
def test_extremes_of_a_norm_inside_a_map(type: str, what: str) -> None:
    spec, given = normed(512, type, 5)
    x = given[0]
    assert isinstance(x, np.ndarray)
    x[0, {"one is huge": slice(7, 8), "a block is zero": slice(64, 96), "all are zero": slice(None)}.get(what, 500)] = {
        "one is huge": 3e4, "nan": np.nan, "inf": np.inf
    }.get(what, 0.0)  # fmt: skip
    inside, names = run_map(spec, given)
    assert names == ["norm_matvec"]
    if what in ("nan", "inf"):
        assert not np.isfinite(inside).any()
        return
    (want,) = reference.run_op(NORM_LINEAR, spec, given)
    assert np.abs(inside - want.reshape(-1)).max() <= 5e-4 * np.abs(want).max()


def test_which_maps_have_their_norm_inside() -> None:
    """GLM-4.7-Flash's q_b; of TinyLlama none, nor heads, nor floats."""
    assert own_row.takes_norm("Q4_K", 5120, 768)
    assert not own_row.takes_norm("Q4_K", 2560, 2048)
    assert not own_row.takes_norm("Q6_K", 49152, 576)
    assert not own_row.takes_norm("F16", 512, 512)
