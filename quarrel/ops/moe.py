"""Mixture of experts: choosing experts per token, and the products with the chosen ones only.

    route:        softmax        p = softmax(z), the k largest, divided by their sum (at least 2^-14) if `renormalise`
                  softmax_topk   the k largest of z, softmax over those
                  sigmoid        p = sigmoid(z), the k largest of p + bias, weights p, divided by their sum if `renormalise`
                  and all weights times `scale`, and each times its expert's gain if there are gains. With groups, only
                  experts of the `groups_used` best groups take part, a group scoring the sum of its two best.
    expert_up:    y[t, j] = act(gate_e x_t, up_e x_t)     for the j-th chosen expert e of token t
    expert_down:  out[t] = sum_j weight[t, j] * (down_e y[t, j] + bias_e)      added in the order j = 0, 1, ...

Of equal scores the lower id wins. `oai` is gpt-oss's activation: g = min(g, 7), u = clamp(u, -7, 7), and
g * sigmoid(1.702 g) * (u + 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops import draw
from quarrel.ops.activation import activate, sigmoid
from quarrel.ops.contract import Array, Case, Concrete, Op, Param, RawWeight, Value, WeightRef
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.null import Builder

Gate = Literal["softmax", "softmax_topk", "sigmoid"]
ExpertActivation = Literal["silu", "relu2", "oai", "gelu_tanh"]
SMALLEST_SUM = 2.0**-14
_Stack = tuple[int, int, int, int]


@dataclass(frozen=True)
class RouteSpec:
    """`used` of `n_experts`; `bias` shifts the choice but not the weights."""

    n_experts: int
    used: int
    gate: Gate
    renormalise: bool = True
    scale: float = 1.0
    bias: bool = False
    n_groups: int = 1
    groups_used: int = 1
    gains: bool = False


def route_reference(s: RouteSpec, logits: Array, *vectors: RawWeight) -> tuple[Array, Array]:
    """NumPy body. `vectors`: the bias, the gains, as far as there are."""
    bias, gains = vectors[0] if s.bias else None, vectors[-1] if s.gains else None
    z = logits.astype(np.float64)
    p = z if s.gate == "softmax_topk" else sigmoid(z) if s.gate == "sigmoid" else _softmax(z)
    score = p if bias is None else p + bias.dense().reshape(-1)
    if s.n_groups > 1:
        grouped = score.reshape(len(z), s.n_groups, -1)
        best = np.sort(grouped, -1)[..., -2:].sum(-1)
        dropped = np.argsort(-best, -1, kind="stable")[:, s.groups_used :]
        grouped = grouped.copy()
        np.put_along_axis(grouped, dropped[..., None], -np.inf, 1)
        score = grouped.reshape(score.shape)
    ids = np.argsort(-score, -1, kind="stable")[:, : s.used]
    weights = np.take_along_axis(p, ids, 1)
    if s.gate == "softmax_topk":
        weights = _softmax(weights)
    elif s.renormalise:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), SMALLEST_SUM)
    if gains is not None:
        weights = weights * gains.dense().reshape(-1)[ids]
    return ids.astype(np.int32), (weights * s.scale).astype(np.float32)


def _softmax(z: Array) -> Array:
    e = np.exp(z - z.max(-1, keepdims=True))
    p: Array = e / e.sum(-1, keepdims=True)
    return p


def _make_route(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: RouteSpec = case.spec
    logits = draw.activations(rng, case.dims["T"], s.n_experts) * 2
    logits[0] = 0.0
    if case.dims.get("far"):  # what exp of them alone does not hold
        logits[1::2] += 100.0
        logits[2::2] -= 100.0
    return (logits, *(draw.weight(rng, GGMLType.F32, 1, s.n_experts, 0.1) for _ in range(s.bias + s.gains)))


def _route_strategy() -> Any:
    from hypothesis import strategies as st

    def case(groups: int, per: int, used: int, gate: Gate, renormalise: bool, bias: bool, gains: bool, t: int) -> Case:
        groups, per = (groups, max(per, 2)) if gate == "sigmoid" else (1, per)
        kept = max(1, groups - 1)
        used, bias = min(used, kept * per), bias and gate == "sigmoid"
        spec = RouteSpec(groups * per, used, gate, renormalise, 1.5, bias, groups, kept, gains)
        return Case(spec, {"T": t})

    gates = st.sampled_from(["softmax", "softmax_topk", "sigmoid"])
    flags = (st.booleans(), st.booleans(), st.booleans(), st.integers(1, 9))
    return st.builds(case, st.integers(1, 4), st.integers(1, 40), st.integers(1, 8), gates, *flags)


ROUTE = Op(
    "route",
    RouteSpec,
    lambda s: (
        Param("logits", "f32", "T n_experts"),
        *((Param("bias", "weight", "n_experts"),) if s.bias else ()),
        *((Param("gains", "weight", "n_experts"),) if s.gains else ()),
    ),
    lambda s: (Param("ids", "i32", "T used"), Param("weights", "f32", "T used")),
    reference=route_reference,
    make=_make_route,
    strategy=_route_strategy,
    cases=lambda: [
        Case(RouteSpec(8, 2, "softmax"), {"T": 5}, "row 0 is all ties"),
        Case(RouteSpec(64, 6, "softmax", renormalise=False), {"T": 3}),
        Case(RouteSpec(32, 4, "softmax_topk"), {"T": 17}),
        Case(RouteSpec(128, 6, "sigmoid", scale=2.5, bias=True), {"T": 9}),
        Case(RouteSpec(32, 4, "sigmoid", bias=True, n_groups=4, groups_used=2), {"T": 6}, "groups"),
        Case(RouteSpec(3, 3, "softmax"), {"T": 1}, "every expert"),
        Case(RouteSpec(40, 5, "softmax", gains=True), {"T": 7}, "gains"),
        Case(RouteSpec(40, 5, "sigmoid", bias=True, gains=True), {"T": 1}, "bias and gains"),
        Case(RouteSpec(40, 5, "softmax", renormalise=False), {"T": 5, "far": 1}, "logits far from 0"),
        Case(RouteSpec(40, 5, "softmax_topk"), {"T": 5, "far": 1}, "logits far from 0"),
    ],
)


def route(
    b: Builder, spec: RouteSpec, logits: Value, bias: WeightRef | None = None, gains: WeightRef | None = None
) -> tuple[Value, Value]:
    """Expert ids and weights, `[T, used]`."""
    ids, weights = b.emit(ROUTE, spec, logits, *_present(bias, gains))
    return ids, weights


@dataclass(frozen=True)
class ExpertUpSpec:
    """`n_experts` matrices `[n, k]` stacked as rows; `gated` has a gate matrix beside the up matrix."""

    type: GGMLType
    n_experts: int
    used: int
    n: int
    k: int
    activation: ExpertActivation
    gated: bool = True
    bias: bool = False

    @property
    def rows(self) -> int:
        return self.n_experts * self.n


def expert_activate(kind: ExpertActivation, gate: Array | None, up: Array) -> Array:
    """The activation in float64; `relu2` has no gate."""
    if gate is None:
        relu = np.maximum(up, 0.0)
        return relu * relu
    if kind == "oai":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        y: Array = gate * sigmoid(1.702 * gate) * (up + 1.0)
        return y
    return activate("gelu_tanh" if kind == "gelu_tanh" else "silu", gate) * up


def expert_up_reference(s: ExpertUpSpec, x: Array, ids: Array, *weights: RawWeight) -> tuple[Array]:
    """NumPy body. `weights`: gate if gated, up, then their biases in the same order."""
    count = 1 + s.gated
    stacks = [w.dense().reshape(s.n_experts, s.n, s.k).astype(np.float64) for w in weights[:count]]
    biases = [w.dense().reshape(s.n_experts, s.n) for w in weights[count:]]
    y = np.empty((len(x), s.used, s.n))
    for t, chosen in enumerate(ids):
        parts = [np.stack([stack[e] @ x[t] for e in chosen]) for stack in stacks]
        if s.bias:
            parts = [part + b[chosen] for part, b in zip(parts, biases, strict=True)]
        y[t] = expert_activate(s.activation, parts[0] if s.gated else None, parts[-1])
    return (y.astype(np.float32),)


def _expert_up_params(s: ExpertUpSpec) -> tuple[Param, ...]:
    names = ("gate", "up") if s.gated else ("up",)
    biases = tuple(Param(f"{name}_bias", "weight", "n_experts n") for name in names) if s.bias else ()
    return (
        Param("x", "act", "T k"),
        Param("ids", "i32", "T used"),
        *(Param(name, "weight", "rows k") for name in names),
        *biases,
    )


def _make_ids(case: Case, rng: np.random.Generator) -> Array:
    s = case.spec
    ids = np.stack([rng.permutation(s.n_experts)[: s.used] for _ in range(case.dims["T"])]).astype(np.int32)
    if "all_on" in case.dims:
        ids[:, 0] = case.dims["all_on"]
    return ids


def _make_expert_up(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: ExpertUpSpec = case.spec
    x = draw.activations(rng, case.dims["T"], s.k)
    stacks = [draw.weight(rng, s.type, s.rows, s.k) for _ in range(1 + s.gated)]
    biases = [draw.weight(rng, GGMLType.F32, s.n_experts, s.n, 1.0) for _ in stacks] if s.bias else []
    return (x, _make_ids(case, rng), *stacks, *biases)


def _stacks() -> Any:
    """Experts, how many of them are used, rows of one, blocks of a row: few with many rows, or as many as models have."""
    from hypothesis import strategies as st

    small = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 40), st.integers(1, 3))
    real = st.sampled_from([(32, 4), (64, 6), (64, 8), (128, 6), (128, 8)])
    many = st.builds(lambda counts, n: (*counts, n, 1), real, st.integers(1, 4))
    return small | many


def _expert_up_strategy() -> Any:
    from hypothesis import strategies as st

    def case(type: GGMLType, stack: _Stack, kind: ExpertActivation, bias: bool, t: int) -> Case:
        experts, used, n, blocks = stack
        k = FORMATS[type].elements * blocks
        spec = ExpertUpSpec(type, experts, min(used, experts), n, k, kind, kind != "relu2", bias)
        return Case(spec, {"T": t})

    kinds = st.sampled_from(["silu", "relu2", "oai", "gelu_tanh"])
    return st.builds(case, st.sampled_from(WEIGHT_TYPES), _stacks(), kinds, st.booleans(), st.integers(1, 9))


EXPERT_UP = Op(
    "expert_up",
    ExpertUpSpec,
    _expert_up_params,
    lambda s: (Param("y", "act", "T used n"),),
    reference=expert_up_reference,
    make=_make_expert_up,
    strategy=_expert_up_strategy,
    cases=lambda: [
        Case(ExpertUpSpec(GGMLType.Q4_K, 4, 2, 67, 256, "silu"), {"T": 1}, "decode"),
        Case(ExpertUpSpec(GGMLType.Q8_0, 8, 3, 48, 96, "relu2", gated=False), {"T": 5}),
        Case(ExpertUpSpec(GGMLType.MXFP4, 4, 2, 40, 288, "oai", bias=True), {"T": 7}),
        Case(ExpertUpSpec(GGMLType.Q5_0, 6, 2, 32, 64, "silu"), {"T": 33}, "some experts with no rows"),
        Case(ExpertUpSpec(GGMLType.Q8_0, 6, 2, 32, 64, "gelu_tanh"), {"T": 5}, "GELU"),
        Case(ExpertUpSpec(GGMLType.Q6_K, 3, 1, 16, 256, "silu"), {"T": 9, "all_on": 2}, "one expert has every row"),
    ],
)


def expert_up(b: Builder, spec: ExpertUpSpec, x: Value, ids: Value, *weights: WeightRef) -> Value:
    """`[T, used, n]`; `weights` as in the reference."""
    return b.emit(EXPERT_UP, spec, x, ids, *weights)[0]


@dataclass(frozen=True)
class ExpertDownSpec:
    """`n_experts` matrices `[n, k]` stacked as rows."""

    type: GGMLType
    n_experts: int
    used: int
    n: int
    k: int
    bias: bool = False

    @property
    def rows(self) -> int:
        return self.n_experts * self.n


def expert_down_reference(
    s: ExpertDownSpec, y: Array, ids: Array, weights: Array, down: RawWeight, bias: RawWeight | None = None
) -> tuple[Array]:
    """NumPy body."""
    stack = down.dense().reshape(s.n_experts, s.n, s.k).astype(np.float64)
    offset = np.zeros((s.n_experts, s.n)) if bias is None else bias.dense().reshape(s.n_experts, s.n)
    out = np.zeros((len(y), s.n))
    for t, chosen in enumerate(ids):
        for j, e in enumerate(chosen):
            out[t] += weights[t, j] * (stack[e] @ y[t, j] + offset[e])
    return (out.astype(np.float32),)


def _make_expert_down(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: ExpertDownSpec = case.spec
    tokens = case.dims["T"]
    y = draw.activations(rng, tokens, s.used, s.k)
    weights = rng.dirichlet(np.ones(s.used), tokens).astype(np.float32)
    bias = (draw.weight(rng, GGMLType.F32, s.n_experts, s.n, 1.0),) if s.bias else ()
    return (y, _make_ids(case, rng), weights, draw.weight(rng, s.type, s.rows, s.k), *bias)


def _expert_down_strategy() -> Any:
    from hypothesis import strategies as st

    def case(type: GGMLType, stack: _Stack, bias: bool, t: int) -> Case:
        experts, used, n, blocks = stack
        spec = ExpertDownSpec(type, experts, min(used, experts), n, FORMATS[type].elements * blocks, bias)
        return Case(spec, {"T": t})

    return st.builds(case, st.sampled_from(WEIGHT_TYPES), _stacks(), st.booleans(), st.integers(1, 9))


EXPERT_DOWN = Op(
    "expert_down",
    ExpertDownSpec,
    lambda s: (
        Param("y", "act", "T used k"),
        Param("ids", "i32", "T used"),
        Param("weights", "f32", "T used"),
        Param("down", "weight", "rows k"),
        *((Param("bias", "weight", "n_experts n"),) if s.bias else ()),
    ),
    lambda s: (Param("out", "f32", "T n"),),
    reference=expert_down_reference,
    make=_make_expert_down,
    strategy=_expert_down_strategy,
    cases=lambda: [
        Case(ExpertDownSpec(GGMLType.Q4_K, 4, 2, 67, 256), {"T": 1}, "decode"),
        Case(ExpertDownSpec(GGMLType.Q8_0, 8, 3, 96, 64), {"T": 5}),
        Case(ExpertDownSpec(GGMLType.MXFP4, 4, 2, 40, 160, bias=True), {"T": 7}),
        Case(ExpertDownSpec(GGMLType.Q6_K, 3, 1, 16, 256), {"T": 9, "all_on": 1}, "one expert has every row"),
    ],
)


def expert_down(
    b: Builder, spec: ExpertDownSpec, y: Value, ids: Value, weights: Value, down: WeightRef, bias: WeightRef | None = None
) -> Value:
    """`[T, n]` float32."""
    return b.emit(EXPERT_DOWN, spec, y, ids, weights, down, *_present(bias))[0]


def _present(*refs: WeightRef | None) -> tuple[Any, ...]:
    return tuple(ref for ref in refs if ref is not None)
