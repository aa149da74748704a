"""Linear maps over packed weights, and the fusions around them.

    linear:        y[t, n] = sum_k x[t, k] * W[n, k] (+ b[n])
    linear_add:    y = residual + scale * linear(x)
    norm_linear:   (W1 norm(x), W2 norm(x), ...)              one read of x for query, key and value
    norm_gate_up:  act(gate norm(x)) * up norm(x)

`W` is `[n, k]` in any block format; its values are the format's exact float32 values. Sums are accumulated in float32 or
wider; `int8` arithmetic rounds x to 8 bits per block of at most 256, as llama.cpp's CPU kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops import draw
from quarrel.ops.activation import Activation, GatedSpec, gated
from quarrel.ops.contract import Array, Case, Concrete, Op, Operand, Param, RawWeight, Value, WeightRef
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.norm import NormSpec, norm, norm_params
from quarrel.ops.null import Builder

Linear = tuple[WeightRef, WeightRef | None]
"""A weight and its bias, if it has one."""


@dataclass(frozen=True)
class LinearSpec:
    """Static facts of one linear map; `out` is the kind of its result (`f32` for logits)."""

    type: GGMLType
    n: int
    k: int
    bias: bool = False
    out: Literal["act", "f32"] = "act"


def linear_params(s: LinearSpec) -> tuple[Param, ...]:
    bias = (Param("bias", "weight", "n"),) if s.bias else ()
    return (Param("x", "act", "T k"), Param("weight", "weight", "n k"), *bias)


def linear_reference(s: LinearSpec, x: Array, weight: RawWeight, bias: RawWeight | None = None) -> tuple[Array]:
    y = x.astype(np.float64) @ weight.dense().astype(np.float64).T
    if bias is not None:
        y += bias.dense().reshape(-1)
    return (y.astype(np.float32),)


def _make_linear(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: LinearSpec = case.spec
    bias = (draw.weight(rng, GGMLType.F32, 1, s.n),) if s.bias else ()
    x, weight = draw.activations(rng, case.dims["T"], s.k), draw.weight(rng, s.type, s.n, s.k)
    if bits := case.dims.get("bits"):
        weight = draw.small_codes(weight, bits)
    return (x, weight, *bias)


def _linear_cases() -> list[Case]:
    cases = []
    for type in WEIGHT_TYPES:
        k = FORMATS[type].elements
        cases += [
            Case(LinearSpec(type, 8, max(k, 32)), {"T": 1}, "one block a row"),
            Case(LinearSpec(type, 67, 256 * 3, bias=True), {"T": 3}, "odd n, bias"),
            Case(LinearSpec(type, 129, 512), {"T": 17}, "odd rows"),
        ]
        if k in (32, 64):
            cases.append(Case(LinearSpec(type, 33, k * 11), {"T": 5}, "k not a multiple of 256"))
        if k == 1:
            cases.append(Case(LinearSpec(type, 5, 77), {"T": 2}, "k not a multiple of 32"))
    for type, bits in ((GGMLType.Q4_1, 2), (GGMLType.Q4_1, 3), (GGMLType.Q8_1, 6)):
        note = f"codes of {bits} bits"
        cases.append(Case(LinearSpec(type, 67, 32 * 11, bias=True), {"T": 3, "bits": bits}, note))
        cases.append(Case(LinearSpec(type, 129, 512), {"T": 17, "bits": bits}, note))
    cases.append(Case(LinearSpec(GGMLType.Q4_K, 384, 2048, out="f32"), {"T": 130}, "many rows"))
    cases.append(Case(LinearSpec(GGMLType.Q6_K, 1, 256), {"T": 9}, "a single output"))
    return cases


def linear_strategy() -> Any:
    """Any format, any small shape."""
    from hypothesis import strategies as st

    def case(type: GGMLType, n: int, blocks: int, t: int, bias: bool) -> Case:
        return Case(LinearSpec(type, n, FORMATS[type].elements * blocks, bias), {"T": t})

    return st.builds(
        case, st.sampled_from(WEIGHT_TYPES), st.integers(1, 70), st.integers(1, 6), st.integers(1, 20), st.booleans()
    )


LINEAR = Op(
    "linear",
    LinearSpec,
    linear_params,
    lambda s: (Param("y", s.out, "T n"),),
    reference=linear_reference,
    make=_make_linear,
    cases=_linear_cases,
    strategy=linear_strategy,
)


def linear(b: Builder, x: Value, w: WeightRef, bias: WeightRef | None = None, out: Literal["act", "f32"] = "act") -> Value:
    """`W x (+ bias)`, `[T, k]` to `[T, n]`."""
    return b.emit(LINEAR, LinearSpec(w.type, w.rows, w.k, bias is not None, out), x, w, *_present(bias))[0]


@dataclass(frozen=True)
class LinearAddSpec:
    """`residual + scale * linear(x)`."""

    linear: LinearSpec
    scale: float = 1.0

    @property
    def n(self) -> int:
        return self.linear.n


def _linear_add_expand(b: Builder, s: LinearAddSpec, inputs: Sequence[Operand]) -> Sequence[Value]:
    residual, *rest = inputs
    (y,) = b.emit(LINEAR, replace(s.linear, out="f32"), *rest)
    return b.emit(ADD, AddSpec(s.n, s.scale), residual, y)


def _make_linear_add(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: LinearAddSpec = case.spec
    return (draw.activations(rng, case.dims["T"], s.n), *_make_linear(Case(s.linear, case.dims), rng))


def _fusion_strategy(fused: Callable[[LinearSpec], Any]) -> Callable[[], Any]:
    """Any format and small shape of a linear map, in the spec that `fused` makes of it."""

    def strategy() -> Any:
        from hypothesis import strategies as st

        def case(type: GGMLType, n: int, blocks: int, bias: bool, t: int) -> Case:
            return Case(fused(LinearSpec(type, n, FORMATS[type].elements * blocks, bias)), {"T": t})

        sizes = (st.integers(1, 50), st.integers(1, 4), st.booleans(), st.integers(1, 9))
        return st.builds(case, st.sampled_from(WEIGHT_TYPES), *sizes)

    return strategy


LINEAR_ADD = Op(
    "linear_add",
    LinearAddSpec,
    lambda s: (Param("residual", "f32", "T n"), *(_sized(p, s.linear) for p in linear_params(s.linear))),
    lambda s: (Param("y", "f32", "T n"),),
    expand=_linear_add_expand,
    make=_make_linear_add,
    strategy=_fusion_strategy(lambda linear: LinearAddSpec(linear, 0.5)),
    cases=lambda: [
        Case(LinearAddSpec(LinearSpec(t, 67, 512, bias), 0.22), {"T": n})
        for t, bias, n in ((GGMLType.Q4_K, False, 1), (GGMLType.Q6_K, True, 3), (GGMLType.F16, False, 5))
    ],
)


def linear_add(
    b: Builder, residual: Value, x: Value, w: WeightRef, bias: WeightRef | None = None, scale: float = 1.0
) -> Value:
    """`residual + scale * (W x + bias)`, float32."""
    spec = LinearAddSpec(LinearSpec(w.type, w.rows, w.k, bias is not None), scale)
    return b.emit(LINEAR_ADD, spec, residual, x, w, *_present(bias))[0]


@dataclass(frozen=True)
class AddSpec:
    """`a + scale * b`, both `[T, n]`."""

    n: int
    scale: float = 1.0


def add_reference(s: AddSpec, a: Array, b: Array) -> tuple[Array]:
    """NumPy body."""
    return ((a + np.float32(s.scale) * b).astype(np.float32),)


def _add_strategy() -> Any:
    from hypothesis import strategies as st

    return st.builds(lambda n, t: Case(AddSpec(n, 0.25), {"T": t}), st.integers(1, 300), st.integers(1, 9))


ADD = Op(
    "add",
    AddSpec,
    lambda s: (Param("a", "f32", "T n"), Param("b", "act", "T n")),
    lambda s: (Param("y", "f32", "T n"),),
    reference=add_reference,
    make=lambda c, rng: (draw.activations(rng, c.dims["T"], c.spec.n), draw.activations(rng, c.dims["T"], c.spec.n)),
    strategy=_add_strategy,
    cases=lambda: [Case(AddSpec(n, scale), {"T": t}) for n, scale, t in ((1, 1.0, 9), (77, 0.22, 3), (512, 1.0, 17))],
)


def add(b: Builder, a: Value, x: Value, scale: float = 1.0) -> Value:
    """`a + scale * x`, float32."""
    return b.emit(ADD, AddSpec(a.dims[1], scale), a, x)[0]  # type: ignore[arg-type]


@dataclass(frozen=True)
class NormLinearSpec:
    """Several linear maps of one normalised row."""

    norm: NormSpec
    linears: tuple[LinearSpec, ...]


def _norm_linear_params(s: NormLinearSpec) -> tuple[Param, ...]:
    return (*norm_params(s.norm), *(_sized(p, lin) for lin in s.linears for p in linear_params(lin)[1:]))


def _norm_linear_expand(b: Builder, s: NormLinearSpec, inputs: Sequence[Operand]) -> Sequence[Value]:
    n = len(norm_params(s.norm))
    x = norm(b, s.norm, *inputs[:n])
    rest = list(inputs[n:])
    made: list[Value] = []
    for lin in s.linears:
        count = len(linear_params(lin)) - 1
        made += b.emit(LINEAR, lin, x, *rest[:count])
        del rest[:count]
    return made


def _make_norm_linear(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: NormLinearSpec = case.spec
    rest = [i for lin in s.linears for i in _make_linear(Case(lin, case.dims), rng)[1:]]
    return (draw.activations(rng, case.dims["T"], s.norm.k), draw.weight(rng, GGMLType.F32, 1, s.norm.k, 1.0), *rest)


NORM_LINEAR = Op(
    "norm_linear",
    NormLinearSpec,
    _norm_linear_params,
    lambda s: tuple(Param(f"y{i}", lin.out, f"T {lin.n}") for i, lin in enumerate(s.linears)),
    expand=_norm_linear_expand,
    make=_make_norm_linear,
    strategy=_fusion_strategy(lambda linear: NormLinearSpec(NormSpec("rms", linear.k, 1e-5), (linear, linear))),
    cases=lambda: [
        Case(
            NormLinearSpec(NormSpec("rms", 512, 1e-5), tuple(LinearSpec(t, n, 512, bias) for n in (64, 16, 16))),
            {"T": rows},
        )
        for t, bias, rows in ((GGMLType.Q4_K, False, 1), (GGMLType.Q8_0, True, 3), (GGMLType.Q6_K, False, 9))
    ],
)


def norm_linear(
    b: Builder, spec: NormSpec, x: Value, gains: Sequence[WeightRef], maps: Sequence[Linear]
) -> tuple[Value, ...]:
    """Each `(weight, bias)` of `maps` applied to `norm(x)`; `gains` are the norm's weight and, for layer norm, bias."""
    linears = tuple(LinearSpec(w.type, w.rows, w.k, bias is not None) for w, bias in maps)
    rest = [ref for w, bias in maps for ref in (w, *_present(bias))]
    return b.emit(NORM_LINEAR, NormLinearSpec(spec, linears), x, *gains, *rest)


@dataclass(frozen=True)
class NormGateUpSpec:
    """The first half of a gated feed-forward: `act(gate norm(x)) * up norm(x)`."""

    norm: NormSpec
    gate: LinearSpec
    up: LinearSpec
    activation: Activation


def _norm_gate_up_expand(b: Builder, s: NormGateUpSpec, inputs: Sequence[Operand]) -> Sequence[Value]:
    n = len(norm_params(s.norm))
    count = len(linear_params(s.gate)) - 1
    x = norm(b, s.norm, *inputs[:n])
    rest = inputs[n:]
    (gate,) = b.emit(LINEAR, s.gate, x, *rest[:count])
    (up,) = b.emit(LINEAR, s.up, x, *rest[count:])
    return (gated(b, GatedSpec(s.activation, s.gate.n), gate, up),)


def _make_norm_gate_up(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: NormGateUpSpec = case.spec
    both = NormLinearSpec(s.norm, (s.gate, s.up))
    return _make_norm_linear(Case(both, case.dims), rng)


def _norm_gate_up_cases() -> list[Case]:
    tried: list[tuple[GGMLType, Activation, int]] = [
        (GGMLType.Q4_K, "silu", 1),
        (GGMLType.Q8_0, "gelu_tanh", 3),
        (GGMLType.Q5_0, "gelu_erf", 2),
        (GGMLType.Q6_K, "silu", 9),
    ]
    return [
        Case(NormGateUpSpec(NormSpec("rms", 512, 1e-5), LinearSpec(t, 131, 512), LinearSpec(t, 131, 512), act), {"T": rows})
        for t, act, rows in tried
    ]


NORM_GATE_UP = Op(
    "norm_gate_up",
    NormGateUpSpec,
    lambda s: _norm_linear_params(NormLinearSpec(s.norm, (s.gate, s.up))),
    lambda s: (Param("y", "act", f"T {s.gate.n}"),),
    expand=_norm_gate_up_expand,
    make=_make_norm_gate_up,
    strategy=_fusion_strategy(lambda s: NormGateUpSpec(NormSpec("rms", s.k, 1e-5), s, s, "silu")),
    cases=_norm_gate_up_cases,
)


def norm_gate_up(
    b: Builder,
    spec: NormSpec,
    x: Value,
    gains: Sequence[WeightRef],
    gate: Linear,
    up: Linear,
    activation: Activation,
) -> Value:
    """`activation(gate norm(x)) * up norm(x)`, `[T, F]`."""
    specs = [LinearSpec(w.type, w.rows, w.k, bias is not None) for w, bias in (gate, up)]
    rest = [ref for w, bias in (gate, up) for ref in (w, *_present(bias))]
    return b.emit(NORM_GATE_UP, NormGateUpSpec(spec, specs[0], specs[1], activation), x, *gains, *rest)[0]


def _present(bias: WeightRef | None) -> tuple[WeightRef, ...]:
    return () if bias is None else (bias,)


def _sized(p: Param, lin: LinearSpec) -> Param:
    axes = " ".join(a if a[0].isupper() else str(getattr(lin, a)) for a in p.axes.split())
    return Param(p.name, p.kind, axes)
