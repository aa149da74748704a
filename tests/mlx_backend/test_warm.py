"""What values reach while a model loads chooses its arithmetic."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.warm import largest
from quarrel.ops import draw
from quarrel.ops.contract import RawWeight, WeightRef, rel_error
from quarrel.ops.embedding import embedding, gather_rows
from quarrel.ops.linear import linear, linear_add, norm_linear
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.program import Program
from quarrel.ops.reference import run_program
from tests.mlx_backend.cases import running
from tests.mlx_backend.emulated import FAST
from tests.mlx_backend.test_step import LIMITS, PREFILL, VOCAB, batch

WIDTH = 64


class Weights:
    """Random, and what `loud` gives is `times` as large."""

    def __init__(self, times: float) -> None:
        self._times = times

    def raw(self, ref: WeightRef) -> RawWeight:
        scale = {"gain": 1.0, "loud": 0.1 * self._times}.get(ref.name, 0.1)
        return draw.weight(np.random.default_rng(sum(ref.name.encode())), ref.type, ref.rows, ref.k, scale)


def build() -> Program:
    b = Builder()
    pre = NormSpec("rms", WIDTH, 1e-5)
    gain, table = WeightRef("gain", GGMLType.F32, 1, WIDTH), WeightRef("embd", GGMLType.Q8_0, VOCAB, WIDTH)
    h = embedding(b, b.input("ids"), table)
    (y,) = norm_linear(b, pre, h, [gain], [(WeightRef("loud", GGMLType.BF16, WIDTH, WIDTH), None)])
    h = linear_add(b, h, y, WeightRef("o", GGMLType.Q8_0, WIDTH, WIDTH))
    h = norm(b, replace(pre, out="f32"), gather_rows(b, h, b.input("out_rows")), gain)
    return b.program(logits=linear(b, h, table, out="f32"))


PROGRAM = build()


@pytest.mark.parametrize("times", [1e4, 1e6], ids=["near the end", "past the end"])
def test_values_that_float16_cannot_hold_are_computed_in_bfloat16(times: float, caplog: pytest.LogCaptureFixture) -> None:
    weights, inputs = Weights(times), batch(PREFILL)
    with running(FAST) as backend, caplog.at_level(logging.WARNING, "quarrel"):
        exact = backend.compile(PROGRAM, weights, LIMITS, "float16")
        assert (largest(exact) < 65504) == (times == 1e4)
        step = backend.compile(PROGRAM, weights, LIMITS, "auto")
        got = step(inputs, "logits").logits
    assert step.compute == "bfloat16"
    assert "it is computed in bfloat16, for float16 ends at 65504" in caplog.text
    want = run_program(PROGRAM, weights, [], inputs)["logits"]
    assert rel_error(got, want) < 2e-2  # type: ignore[arg-type]


def test_values_that_it_holds_stay_in_float16() -> None:
    with running(FAST) as backend:
        step = backend.compile(PROGRAM, Weights(1), LIMITS, "auto")
        assert 0.1 < largest(step) < 100
        kept = backend.compile(PROGRAM, Weights(1e6), replace(LIMITS, kv_cache="float16"), "auto")
    assert (step.compute, kept.compute) == ("float16", "float16")
