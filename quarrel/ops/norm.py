"""Normalisation of rows, or of equal groups within a row.

    rms:    y = x / sqrt(mean(x^2) + eps) * w
    layer:  y = (x - mean(x)) / sqrt(var(x) + eps) * w + b     with the biased variance

Both in float32 or wider; the result is rounded once. `groups` > 1 normalises each run of `k` values by itself with the same
gain, as the query and key norms of Qwen 3 and Gemma 3 do per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import Array, Case, Concrete, Op, Operand, Param, RawWeight, Value
from quarrel.ops.null import Builder


@dataclass(frozen=True)
class NormSpec:
    """`k` values share one norm; a row holds `groups` of them. `bias` exists for `layer` only."""

    kind: Literal["rms", "layer"]
    k: int
    eps: float
    groups: int = 1
    out: Literal["act", "f32"] = "act"

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.k * self.groups


def norm_params(s: NormSpec) -> tuple[Param, ...]:
    """x, gain and, for layer norm, bias."""
    bias = (Param("bias", "weight", str(s.k)),) if s.kind == "layer" else ()
    return (Param("x", "act", f"T {s.width}"), Param("gain", "weight", str(s.k)), *bias)


def norm_reference(s: NormSpec, x: Array, gain: RawWeight, bias: RawWeight | None = None) -> tuple[Array]:
    """NumPy body, in float64."""
    rows = x.astype(np.float64).reshape(len(x), s.groups, s.k)
    if s.kind == "layer":
        rows = rows - rows.mean(-1, keepdims=True)
    y = rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + s.eps) * gain.dense().reshape(-1)
    if bias is not None:
        y = y + bias.dense().reshape(-1)
    return (y.reshape(x.shape).astype(np.float32),)


def _make(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: NormSpec = case.spec
    gains = [draw.weight(rng, GGMLType.F32, 1, s.k, 1.0) for _ in norm_params(s)[1:]]
    return (draw.activations(rng, case.dims["T"], s.width) * 3, *gains)


def _strategy() -> Any:
    from hypothesis import strategies as st

    kind = st.sampled_from(["rms", "layer"])
    eps = st.sampled_from([1e-6, 1e-5, 1e-3])
    spec = st.builds(NormSpec, kind, st.integers(1, 300), eps, st.integers(1, 5))
    return st.builds(lambda s, t: Case(s, {"T": t}), spec, st.integers(1, 9))


NORM = Op(
    "norm",
    NormSpec,
    norm_params,
    lambda s: (Param("y", s.out, f"T {s.width}"),),
    reference=norm_reference,
    make=_make,
    cases=lambda: [
        Case(NormSpec("rms", 256, 1e-5), {"T": 1}),
        Case(NormSpec("rms", 577, 1e-6), {"T": 3}, "odd width"),
        Case(NormSpec("rms", 64, 1e-6, groups=5), {"T": 7}, "per head"),
        Case(NormSpec("layer", 768, 1e-12), {"T": 5}),
        Case(NormSpec("layer", 33, 1e-5, groups=3), {"T": 2}),
        Case(NormSpec("rms", 4096, 1e-5), {"T": 33}),
    ],
    strategy=_strategy,
)


def norm(b: Builder, spec: NormSpec, *inputs: Operand) -> Value:
    """x, gain and, for layer norm, bias to the normalised rows."""
    return b.emit(NORM, spec, *inputs)[0]
