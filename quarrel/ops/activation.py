"""Elementwise functions: gated activations, the scaling and capping of logits, bounds, and the largest values of a row.

gated:  y = f(gate) * up, with a gate for every value or one for a whole row
silu:       x * sigmoid(x)
sigmoid:    1 / (1 + exp(-x))
identity:   x
gelu_tanh:  x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))     (Hendrycks and Gimpel 2016), everywhere computed as
            x * sigmoid(2 sqrt(2/pi) * (x + 0.044715 x^3)), where nothing cancels
gelu_erf:   x/2 * (1 + erf(x / sqrt(2))), computed as x Q(-x) below 0 and x (1 - Q(x)) above (NORMAL_TAIL)
gelu_quick: x * sigmoid(1.702 x)
cap:    y = c * tanh(scale * x / c), or scale * x without a cap    (Gemma 2)
clamp:  y = min(max(x, low), high)    (towers of Gemma 4's small models, around each map)
largest: y = max(x - mean - deviations * std, 0), with the mean and the biased deviation of its row    (Gemma 3n)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quarrel.ops import draw
from quarrel.ops.contract import Array, Case, Op, Param, Value
from quarrel.ops.null import Builder

PlainActivation = Literal["relu2", "gelu_erf", "gelu_tanh", "gelu_quick"]
Activation = Literal["silu", "gelu_tanh", "gelu_erf", "sigmoid", "identity"]


NORMAL_TAIL = (
    -1.95829297, 0.992187063, 0.444800361, -0.25712667, 0.899700557, -1.84695262, 1.52883029, -0.579644331, 0.0833509549
)  # fmt: skip
"""Q(x), the probability that a standard normal variable exceeds x >= 0: erfc(x / sqrt(2)) / 2 = t exp(p(t) - x^2 / 2) with
t = 1 / (1 + x / sqrt(8)), a form of Numerical Recipes (2nd edition, 6.2). These are the coefficients of p, the constant
first: a minimax fit, relative error 1.9e-7 for x < 13, in float32 1e-6 where x < 4."""


@dataclass(frozen=True)
class GatedSpec:
    """`[T, n]` and `[T, n]` to `[T, n]`; with `per_row` the gate is `[T, 1]`; up may be columns `start` to `start + n` of
    `width`."""

    activation: Activation
    n: int
    per_row: bool = False
    width: int = 0
    start: int = 0

    @property
    def gates(self) -> int:
        """Gates of a row."""
        return 1 if self.per_row else self.n

    @property
    def up_width(self) -> int:
        return self.width or self.n


def activate(kind: Activation | PlainActivation, x: Array) -> Array:
    """The function by itself, in float64."""
    x = x.astype(np.float64)
    if kind == "identity":
        return x
    if kind == "sigmoid":
        return sigmoid(x)
    if kind == "silu":
        factor = sigmoid(x)
    elif kind == "gelu_quick":
        factor = sigmoid(1.702 * x)
    elif kind == "gelu_erf":
        factor = 0.5 * _erfc(-x / math.sqrt(2.0))
    else:
        factor = sigmoid(2.0 * np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))
    y: Array = x * factor
    return y


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) in float64, without overflow."""
    # Written so that exp never overflows: 1/(1+e^-x) for x >= 0, e^x/(1+e^x) below.
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def gated_reference(s: GatedSpec, gate: Array, up: Array) -> tuple[Array]:
    """NumPy body."""
    return ((activate(s.activation, gate.astype(np.float64)) * up[:, s.start : s.start + s.n]).astype(np.float32),)


def _make_gated(case: Case, rng: np.random.Generator) -> tuple[Array, Array]:
    """With `below` every gate is about that far below 0, where most activations are nearly 0. A gate for a whole row is not
    much further, so that half precision can hold the row."""
    s, t = case.spec, case.dims["T"]
    gate = draw.activations(rng, t, s.gates) * (1 if s.per_row else 4)
    if below := case.dims.get("below"):
        gate = (rng.integers(-16, 17, gate.shape) / 64 - below).astype(np.float32)  # exact in half precision
    return gate, draw.activations(rng, t, s.up_width)


def _strategy() -> Any:
    from hypothesis import strategies as st

    def spec(kind: Activation, n: int, per_row: bool, start: int, after: int) -> GatedSpec:
        return GatedSpec(kind, n, per_row, start + n + after, start)

    kind = st.sampled_from(["silu", "gelu_tanh", "gelu_erf", "sigmoid", "identity"])
    sizes = (st.integers(1, 300), st.booleans(), st.sampled_from([0, 7, 64]), st.sampled_from([0, 5]))
    return st.builds(lambda s, t: Case(s, {"T": t}), st.builds(spec, kind, *sizes), st.integers(1, 9))


GATED = Op(
    "gated",
    GatedSpec,
    lambda s: (Param("gate", "act", "T gates"), Param("up", "act", "T up_width")),
    lambda s: (Param("y", "act", "T n"),),
    reference=gated_reference,
    make=_make_gated,
    cases=lambda: [
        Case(GatedSpec("silu", 1), {"T": 1}),
        Case(GatedSpec("silu", 577), {"T": 3}),
        Case(GatedSpec("gelu_tanh", 1024), {"T": 5}),
        Case(GatedSpec("sigmoid", 77), {"T": 4}),
        Case(GatedSpec("sigmoid", 1030, per_row=True), {"T": 3}, "a gate a row"),
        Case(GatedSpec("identity", 129), {"T": 2}),
        Case(GatedSpec("gelu_tanh", 96, width=288, start=96), {"T": 3}, "some columns"),
        Case(GatedSpec("gelu_erf", 77), {"T": 3}),
        Case(GatedSpec("silu", 77), {"T": 3, "below": 3}, "silu far below 0"),
        Case(GatedSpec("gelu_tanh", 77), {"T": 3, "below": 3}, "gelu_tanh far below 0"),
        Case(GatedSpec("gelu_erf", 77), {"T": 3, "below": 3}, "gelu_erf far below 0"),
    ],
    strategy=_strategy,
)


def gated(b: Builder, spec: GatedSpec, gate: Value, up: Value) -> Value:
    """`f(gate) * up`, of up the columns that the spec says."""
    return b.emit(GATED, spec, gate, up)[0]


@dataclass(frozen=True)
class PlainSpec:
    """`[T, n]` to `[T, n]`."""

    activation: PlainActivation
    n: int


def plain_reference(s: PlainSpec, x: Array) -> tuple[Array]:
    """NumPy body."""
    x = x.astype(np.float64)
    y = np.maximum(x, 0.0) ** 2 if s.activation == "relu2" else activate(s.activation, x)
    return (y.astype(np.float32),)


def _plain_strategy() -> Any:
    from hypothesis import strategies as st

    spec = st.builds(PlainSpec, st.sampled_from(["relu2", "gelu_erf", "gelu_tanh", "gelu_quick"]), st.integers(1, 300))
    return st.builds(lambda s, t: Case(s, {"T": t}), spec, st.integers(1, 9))


PLAIN = Op(
    "plain",
    PlainSpec,
    lambda s: (Param("x", "act", "T n"),),
    lambda s: (Param("y", "act", "T n"),),
    reference=plain_reference,
    make=lambda c, rng: (draw.activations(rng, c.dims["T"], c.spec.n) * 3,),
    cases=lambda: [
        Case(PlainSpec("relu2", 577), {"T": 3}),
        Case(PlainSpec("gelu_erf", 128), {"T": 5}),
        Case(PlainSpec("gelu_quick", 77), {"T": 3}),
        Case(PlainSpec("gelu_tanh", 77), {"T": 3}),
    ],
    strategy=_plain_strategy,
)


def plain(b: Builder, kind: PlainActivation, x: Value) -> Value:
    """`f(x)`."""
    return b.emit(PLAIN, PlainSpec(kind, int(x.dims[1])), x)[0]


@dataclass(frozen=True)
class CapSpec:
    """Logits scaled, then capped; `cap` 0 means no cap."""

    n: int
    scale: float = 1.0
    cap: float = 0.0


def _cap_reference(s: CapSpec, x: Array) -> tuple[Array]:
    y = x.astype(np.float64) * s.scale
    return ((s.cap * np.tanh(y / s.cap) if s.cap else y).astype(np.float32),)


def _cap_strategy() -> Any:
    from hypothesis import strategies as st

    spec = st.builds(CapSpec, st.integers(1, 500), st.sampled_from([1.0, 0.125, 1 / 6]), st.sampled_from([0.0, 30.0]))
    return st.builds(lambda s, t: Case(s, {"T": t}), spec, st.integers(1, 9))


CAP = Op(
    "cap",
    CapSpec,
    lambda s: (Param("x", "f32", "T n"),),
    lambda s: (Param("y", "f32", "T n"),),
    reference=_cap_reference,
    make=lambda c, rng: (draw.activations(rng, c.dims["T"], c.spec.n) * 20,),
    cases=lambda: [Case(CapSpec(33, 1 / 6.0), {"T": 2}), Case(CapSpec(384, 1.0, 30.0), {"T": 3})],
    strategy=_cap_strategy,
)


def cap(b: Builder, x: Value, scale: float, limit: float) -> Value:
    """`limit * tanh(scale * x / limit)`, or `scale * x` where the limit is 0."""
    return b.emit(CAP, CapSpec(int(x.dims[1]), scale, limit), x)[0]


@dataclass(frozen=True)
class ClampSpec:
    """`[T, n]` to `[T, n]`, no value below `low` or above `high`; a NaN stays one."""

    n: int
    low: float
    high: float


def clamp_reference(s: ClampSpec, x: Array) -> tuple[Array]:
    """NumPy body."""
    return (np.clip(x, np.float32(s.low), np.float32(s.high)),)


def _clamp_strategy() -> Any:
    from hypothesis import strategies as st

    spec = st.builds(
        ClampSpec, st.integers(1, 1100), st.sampled_from([-1.0, 0.0, -1e30]), st.sampled_from([0.5, 2.0, 1e30])
    )
    return st.builds(lambda s, t: Case(s, {"T": t}), spec, st.integers(1, 9))


CLAMP = Op(
    "clamp",
    ClampSpec,
    lambda s: (Param("x", "act", "T n"),),
    lambda s: (Param("y", "act", "T n"),),
    reference=clamp_reference,
    make=lambda c, rng: (draw.activations(rng, c.dims["T"], c.spec.n) * 3,),
    cases=lambda: [
        Case(ClampSpec(77, -1.5, 1.875), {"T": 3}),
        Case(ClampSpec(1030, -0.25, 1e30), {"T": 2}, "one side"),
        Case(ClampSpec(96, 0.5, 0.75), {"T": 5}, "all of one sign"),
    ],
    strategy=_clamp_strategy,
)


def clamp(b: Builder, x: Value, low: float, high: float) -> Value:
    """`x` within these bounds."""
    return b.emit(CLAMP, ClampSpec(int(x.dims[1]), low, high), x)[0]


@dataclass(frozen=True)
class LargestSpec:
    """`[T, n]` to `[T, n]`: how far a value is beyond so many standard deviations above its row's mean; else 0."""

    n: int
    deviations: float


def largest_reference(s: LargestSpec, x: Array) -> tuple[Array]:
    """NumPy body, in float64."""
    x = x.astype(np.float64)
    bound = x.mean(1, keepdims=True) + s.deviations * x.std(1, keepdims=True)
    return (np.maximum(x - bound, 0.0).astype(np.float32),)


def _largest_strategy() -> Any:
    from hypothesis import strategies as st

    spec = st.builds(LargestSpec, st.integers(1, 300), st.sampled_from([1.6448535, 0.0, -0.5]))
    return st.builds(lambda s, t: Case(s, {"T": t}), spec, st.integers(1, 9))


LARGEST = Op(
    "largest",
    LargestSpec,
    lambda s: (Param("x", "act", "T n"),),
    lambda s: (Param("y", "act", "T n"),),
    reference=largest_reference,
    make=lambda c, rng: (draw.activations(rng, c.dims["T"], c.spec.n) * 3 + np.float32(0.7),),
    cases=lambda: [
        Case(LargestSpec(160, 1.6448535), {"T": 3}),
        Case(LargestSpec(9001, 1.6448535), {"T": 2}, "a wide row"),
        Case(LargestSpec(33, -0.5), {"T": 5}, "most of them"),
    ],
    strategy=_largest_strategy,
)


def largest(b: Builder, x: Value, deviations: float) -> Value:
    """What is above the rest of its row, 0 elsewhere."""
    return b.emit(LARGEST, LargestSpec(int(x.dims[1]), deviations), x)[0]
