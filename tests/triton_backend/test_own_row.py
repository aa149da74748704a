"""Matvecs that make the row they multiply: the same bits as the launches that they replace, and who else is left alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from quarrel.gguf import GGMLType, GGUFFile
from quarrel.models import Tensors, assemble
from quarrel.ops.activation import LARGEST, Activation, GatedSpec, cap, gated, plain
from quarrel.ops.contract import Value, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import LINEAR, add, linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.ops.registry import lower
from quarrel.triton_backend import fuse
from quarrel.triton_backend.backend import REGISTRY, TritonBackend
from quarrel.triton_backend.linear import own_row
from quarrel.triton_backend.plan import Plan
from quarrel.triton_backend.step import TritonStep
from tests.models.test_reference_logits import specify
from tests.paths import need_cases
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
    monkeypatch.setattr(fuse, "_own_rows", lambda *_: [])


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
        assert np.array_equal(together, separate)
    assert names[0] - separately[0] == Counter(gated_matvec=2, norm_add_matvec=2)
    assert separately[0] - names[0] == Counter(gated_int8x2=2, norm_add_int8x2=2, matvec=4)
    assert names[1] == separately[1]


@pytest.mark.parametrize("kept", ["stream", "gated"])
def test_results_are_written(backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    """The stream by the one program of its reader; a gate that is a result has its launch."""
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
        found.append((Counter(going), step._plan.slot(value).tensor[: value.dims[1]].numpy().copy()))  # type: ignore[misc]
        step.close()
    (names, got), (_, want) = found
    assert np.array_equal(got, want)
    assert np.isfinite(got).all()
    assert (names["gated_matvec"], names["norm_add_matvec"]) == ((2, 2) if kept == "stream" else (1, 2))


@pytest.mark.parametrize(
    ("type", "limits", "attribute"),
    [("F16", {}, ""), ("Q4_K", {"deterministic": True}, ""), ("Q4_K", {}, "MOST_GATED"), ("Q4_K", {}, "MOST_NORMED"),
     ("Q4_K", {}, "MOST_OUTPUTS")],
)  # fmt: skip
def test_others_are_left_alone(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch, type: str, limits: dict[str, Any], attribute: str
) -> None:
    """Floats, deterministic steps, and whoever has more columns or outputs."""
    if attribute:
        monkeypatch.setattr(own_row, attribute, 255)
    _, names = ran(backend, per_layer(type, 256, 256), **limits)
    gates, sums = (2 if attribute in ("MOST_NORMED", "MOST_OUTPUTS") else 0), (2 if attribute == "MOST_GATED" else 0)
    assert [names[0][kernel] for kernel in ("gated_matvec", "norm_add_matvec")] == [gates, sums]


def test_a_sum_for_several_maps_is_rounded_once(backend: TritonBackend) -> None:
    """Nor does a map make it that another launch has."""
    for others in ("maps", "activation", "earlier"):
        b, n = Builder(), 96
        h = embedding(b, b.input("ids"), ref("embd", GGMLType.Q8_0, VOCAB, n))
        y = linear(b, h, ref("down", GGMLType.Q8_0, n, n))
        h = add(b, h, norm(b, NormSpec("rms", n, 1e-5), y, ref("gain", GGMLType.F32, 1, n)))
        if others == "maps":
            y = add(b, linear(b, h, ref("x", GGMLType.Q4_0, n, n), out="f32"), linear(b, h, ref("y", GGMLType.Q8_0, n, n)))
        elif others == "activation":
            y = linear(b, plain(b, "relu2", linear(b, h, ref("x", GGMLType.Q4_0, n, n))), ref("y", GGMLType.Q8_0, n, n))
        else:  # in float16, before it
            x = linear(b, h, ref("y", GGMLType.F16, n, n), out="f32")
            y = add(b, x, linear(b, h, ref("x", GGMLType.Q4_0, n, n)))
        made = b.program(hidden=gather_rows(b, add(b, h, y), b.input("out_rows")))
        _, names = ran(backend, made)
        assert (names[0]["norm_add_matvec"], names[0]["norm_add_int8x2"]) == (0, 1)


def test_what_programs_read_lives_until_they_have_read_it(backend: TritonBackend) -> None:
    """The sum, which one of them stores, lies neither where the stream does nor where the norm's x does."""
    made = per_layer("Q4_K", 256, 256)
    step = backend.compile(made, Weights(), LIMITS, "float16")
    assert isinstance(step, TritonStep)
    plan: Plan = step._plan
    sums = [i for i, node in enumerate(made.nodes) if node.op.name == "add"][::2]
    for i in sums:
        norm_, add_ = made.nodes[i - 1], made.nodes[i]
        values = [norm_.inputs[0], add_.inputs[0], add_.outputs[0], made.nodes[i + 1].outputs[0]]
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (plan.slot(v).tensor for v in values))  # type: ignore[arg-type]
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    step.close()


@pytest.mark.parametrize(
    ("arch", "variant", "ahead"), [("gemma4_e", "q4_k_m", ["gated", "norm"]), ("gemma3n", "q4_0x", ["gated"])]
)
def test_models_have_them_in_each_layer(arch: str, variant: str, ahead: list[str]) -> None:
    """Gemma 3n mixes its streams between a sum and the map of one; ten of its layers keep the largest gates only."""
    folder = need_cases(arch)
    with GGUFFile.open(folder / f"model-{variant}.gguf") as file:
        spec = specify(file, folder, variant)
        made = assemble(spec, Tensors(file))
    nodes = [choice.node for choice in lower(made, REGISTRY)]
    found = fuse.find(nodes, "float16", {v.id for v in made.outputs.values()})
    firsts = Counter(nodes[f.first].op.name for f in found if nodes[f.last].op is LINEAR)
    more = sum(node.op is LARGEST for node in nodes)
    assert firsts - Counter(gated=more) == dict.fromkeys(ahead, len(spec.layers))
