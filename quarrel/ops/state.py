"""Recurrent mixers: causal convolution, selective scan of Mamba-1 and Mamba-2, and the gated norm behind the latter.

State is kept per sequence in slots, float32: sequence s uses slot `state_slots[s]`, and one with no cached tokens
(`kv_len[s]` equals its new tokens) starts from zero, whatever the slot holds.

    conv:        y[t, c] = f(bias[c] + sum_j w[c, j] * x[t - W + 1 + j, c])        state: the last W - 1 rows of x
                 f is silu, or nothing
    scan2:       a head h of P channels, group g = h // (H / G), step size d = softplus(dt[t, h] + dt_bias[h]):
                 S[p, n] = exp(d * A[h]) * S[p, n] + d * x[t, h, p] * B[t, g, n]
                 y[t, h, p] = sum_n S[p, n] * C[t, g, n] + D[h] * x[t, h, p]                  (Dao and Gu 2024)
    scan1:       the same with a step size and a row A[c, :] for every channel               (Gu and Dao 2023)
    gated_norm:  u = y * silu(z), each group divided by sqrt(mean(u^2) + eps), times gain
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quarrel.gguf import GGMLType, quantize
from quarrel.ops import draw
from quarrel.ops.activation import activate
from quarrel.ops.contract import Array, Case, Concrete, Op, Param, RawWeight, StateRef, Value, WeightRef
from quarrel.ops.null import Builder

RAGGED = (Param("query_start", "i32", "S1"), Param("kv_len", "i32", "S"), Param("state_slots", "i32", "S"))


def step_inputs(b: Builder) -> tuple[Value, Value, Value]:
    """The step's own `RAGGED`."""
    return b.input("query_start"), b.input("kv_len"), b.input("state_slots")


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) in float64, without overflow."""
    return np.logaddexp(0.0, x.astype(np.float64))


@dataclass(frozen=True)
class ConvSpec:
    """`width` taps over time, one filter per channel, perhaps with a bias, perhaps with an activation."""

    channels: int
    width: int
    bias: bool = True
    activation: Literal["silu", "identity"] = "silu"

    @property
    def state(self) -> tuple[int, int]:
        return (self.width - 1, self.channels)


def conv_reference(s: ConvSpec, x: Array, weight: RawWeight, *rest: Any) -> tuple[Array, Array]:
    """NumPy body; `rest` is the bias, if there is one, and what `CONV` says."""
    *bias, query_start, kv_len, state_slots, state = rest
    taps, offset = weight.dense().astype(np.float64), bias[0].dense().reshape(-1) if bias else 0.0
    y, after = np.empty(x.shape), state.copy()
    for row, slot in enumerate(state_slots):
        rows = slice(query_start[row], query_start[row + 1])
        new = rows.stop - rows.start
        tail = state[slot] if kv_len[row] > new else np.zeros(s.state)
        whole = np.concatenate([tail, x[rows]]).astype(np.float64)  # [W - 1 + new, channels]
        y[rows] = sum(whole[j : j + new] * taps[:, j] for j in range(s.width)) + offset
        after[slot] = whole[new:]
    return activate(s.activation, y).astype(np.float32), after.astype(np.float32)


def drawn_sequences(case: Case, rng: np.random.Generator) -> tuple[int, tuple[Array, Array, Array]]:
    """Up to `Q` new tokens for each of `S` sequences, every other one fresh; slots in random order."""
    seqs = case.dims["S"]
    new = rng.integers(1, case.dims["Q"] + 1, seqs)
    new[0] = case.dims["Q"]
    cached = rng.integers(1, 9, seqs) * (np.arange(seqs) % 2)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    slots = rng.permutation(seqs + 2)[:seqs].astype(np.int32)
    return int(new.sum()), (starts, (new + cached).astype(np.int32), slots)


def drawn_states(rng: np.random.Generator, ragged: Sequence[Any], *shape: int) -> Array:
    """State for two slots more than sequences; what no sequence goes on from is NaN, as another may have left it."""
    starts, kv_len, slots = ragged
    state = np.full((len(slots) + 2, *shape), np.nan, np.float32)
    known = slots[kv_len > np.diff(starts)]
    state[known] = draw.activations(rng, len(known), *shape)
    return state


def drawn_steps(case: Case, rng: np.random.Generator, *shape: int) -> tuple[Array, Array]:
    """Step sizes before softplus, and what to multiply x with: with `extreme` the ends of float16 are among the sizes.

    A step of thousands forgets everything and takes in x as often; x is made as much smaller, so that sums stay in range.
    """
    if not case.dims.get("extreme"):
        return draw.activations(rng, *shape) * 2 - 3, np.ones(shape, np.float32)
    dt = rng.choice(np.array([-65504, -104, -20, -1e-4, 0, 1e-7, 5, 20, 900, 65504], np.float32), shape)
    room = np.where(dt > 1000, 0.0, 1 / np.maximum(softplus(dt), 1)).astype(np.float32)
    return dt, room


def _make_conv(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: ConvSpec = case.spec
    tokens, ragged = drawn_sequences(case, rng)
    weight = draw.weight(rng, GGMLType.F32, s.channels, s.width, 0.5)
    bias = (draw.weight(rng, GGMLType.F32, 1, s.channels, 0.5),) if s.bias else ()
    state = drawn_states(rng, ragged, *s.state)
    return (draw.activations(rng, tokens, s.channels), weight, *bias, *ragged, state)


def _conv_strategy() -> Any:
    from hypothesis import strategies as st

    activation = st.sampled_from(["silu", "identity"])
    spec = st.builds(ConvSpec, st.integers(1, 130), st.integers(2, 6), st.booleans(), activation)
    ragged = {"S": st.integers(1, 4), "Q": st.integers(1, 40)}
    return st.builds(lambda spec, dims: Case(spec, dims), spec, st.fixed_dictionaries(ragged))


CONV = Op(
    "conv",
    ConvSpec,
    lambda s: (
        Param("x", "act", "T channels"),
        Param("weight", "weight", "channels width"),
        *((Param("bias", "weight", "channels"),) if s.bias else ()),
        *RAGGED,
        Param("state", "state"),
    ),
    lambda s: (Param("y", "act", "T channels"),),
    reference=conv_reference,
    make=_make_conv,
    strategy=_conv_strategy,
    consumes="state",
    cases=lambda: [
        Case(ConvSpec(64, 4), {"S": 1, "Q": 1}, "one step"),
        Case(ConvSpec(96, 4), {"S": 3, "Q": 7}),
        Case(ConvSpec(33, 2), {"S": 2, "Q": 5}, "two taps"),
        Case(ConvSpec(16, 4), {"S": 4, "Q": 2}, "fewer tokens than taps"),
        Case(ConvSpec(40, 4, bias=False), {"S": 3, "Q": 6}, "no bias"),
        Case(ConvSpec(70, 3, bias=False, activation="identity"), {"S": 3, "Q": 5}, "no activation"),
    ],
)


def conv(
    b: Builder,
    x: Value,
    weight: WeightRef,
    bias: WeightRef | None,
    state: StateRef,
    activation: Literal["silu", "identity"] = "silu",
) -> Value:
    """The activation of the causal convolution, `[T, channels]`."""
    weights = (weight,) if bias is None else (weight, bias)
    spec = ConvSpec(weight.rows, weight.k, bias is not None, activation)
    return b.emit(CONV, spec, x, *weights, *step_inputs(b), state)[0]


@dataclass(frozen=True)
class Scan2Spec:
    """Mamba-2: `n_heads` heads of `head_dim` channels, `n_groups` groups of B and C, `n_state` states per channel."""

    n_heads: int
    head_dim: int
    n_groups: int
    n_state: int

    @property
    def d_inner(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def width(self) -> int:
        """Channels of x, B and C together."""
        return self.d_inner + 2 * self.n_groups * self.n_state

    @property
    def state(self) -> tuple[int, int, int]:
        return (self.n_heads, self.head_dim, self.n_state)


def scan2_reference(
    s: Scan2Spec,
    xbc: Array,
    dt: Array,
    dt_bias: RawWeight,
    a: RawWeight,
    d: RawWeight,
    query_start: Array,
    kv_len: Array,
    state_slots: Array,
    state: Array,
) -> tuple[Array, Array]:
    """NumPy body: one token after the other, in float64."""
    decay, skip = a.dense().reshape(-1).astype(np.float64), d.dense().reshape(-1)
    step = softplus(dt + dt_bias.dense().reshape(-1))  # [T, H]
    d_inner, wide = s.d_inner, s.n_groups * s.n_state
    x = xbc[:, :d_inner].reshape(-1, s.n_heads, s.head_dim).astype(np.float64)
    groups = xbc[:, d_inner:].reshape(-1, 2, s.n_groups, s.n_state).repeat(s.n_heads // s.n_groups, 2).astype(np.float64)
    assert groups.shape[1] * wide == xbc.shape[1] - d_inner
    y, after = np.empty(x.shape), state.copy()
    for row, slot in enumerate(state_slots):
        start, end = int(query_start[row]), int(query_start[row + 1])
        h = state[slot].astype(np.float64) if kv_len[row] > end - start else np.zeros(s.state)
        for t in range(start, end):
            keep = np.exp(step[t] * decay)[:, None, None]
            h = keep * h + (step[t][:, None] * x[t])[..., None] * groups[t, 0][:, None, :]
            y[t] = (h * groups[t, 1][:, None, :]).sum(-1) + skip[:, None] * x[t]
        after[slot] = h
    return y.reshape(len(xbc), d_inner).astype(np.float32), after


def _make_scan2(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: Scan2Spec = case.spec
    tokens, ragged = drawn_sequences(case, rng)
    bias, skip = (draw.weight(rng, GGMLType.F32, 1, s.n_heads, 1.0) for _ in range(2))
    decay = RawWeight(GGMLType.F32, quantize(-rng.uniform(0.5, 16, (1, s.n_heads)), GGMLType.F32), s.n_heads)
    state = drawn_states(rng, ragged, *s.state)
    dt, room = drawn_steps(case, rng, tokens, s.n_heads)
    xbc = draw.activations(rng, tokens, s.width)
    xbc[:, : s.d_inner] *= room.repeat(s.head_dim, 1)
    return (xbc, dt, bias, decay, skip, *ragged, state)


def _scan2_strategy() -> Any:
    from hypothesis import strategies as st

    def build(groups: int, per: int, dim: int, n_state: int) -> Scan2Spec:
        return Scan2Spec(groups * per, dim, groups, n_state)

    sizes = (st.integers(1, 3), st.integers(1, 3), st.sampled_from([8, 32, 64, 80]), st.sampled_from([16, 24, 32, 128]))
    spec = st.builds(build, *sizes)
    ragged = {"S": st.integers(1, 4), "Q": st.integers(1, 40), "extreme": st.integers(0, 1)}
    return st.builds(lambda spec, dims: Case(spec, dims), spec, st.fixed_dictionaries(ragged))


SCAN2 = Op(
    "scan2",
    Scan2Spec,
    lambda s: (
        Param("xbc", "act", "T width"),
        Param("dt", "act", "T n_heads"),
        *(Param(name, "weight", "n_heads") for name in ("dt_bias", "a", "d")),
        *RAGGED,
        Param("state", "state"),
    ),
    lambda s: (Param("y", "act", "T d_inner"),),
    reference=scan2_reference,
    make=_make_scan2,
    strategy=_scan2_strategy,
    consumes="state",
    cases=lambda: [
        Case(Scan2Spec(4, 64, 1, 32), {"S": 1, "Q": 1}, "one step"),
        Case(Scan2Spec(6, 32, 2, 16), {"S": 3, "Q": 9}, "groups"),
        Case(Scan2Spec(2, 32, 2, 128), {"S": 2, "Q": 90}, "longer than a chunk"),
        Case(Scan2Spec(4, 32, 2, 16), {"S": 3, "Q": 80, "extreme": 1}, "extreme steps"),
        Case(Scan2Spec(5, 80, 1, 24), {"S": 2, "Q": 4}, "odd sizes"),
    ],
)


def scan2(
    b: Builder, spec: Scan2Spec, xbc: Value, dt: Value, weights: tuple[WeightRef, WeightRef, WeightRef], state: StateRef
) -> Value:
    """`[T, n_heads * head_dim]`; `weights` are dt_bias, A and D."""
    return b.emit(SCAN2, spec, xbc, dt, *weights, *step_inputs(b), state)[0]


@dataclass(frozen=True)
class Scan1Spec:
    """Mamba-1: every channel has its own step size and `n_state` decays."""

    channels: int
    n_state: int

    @property
    def state(self) -> tuple[int, int]:
        return (self.channels, self.n_state)


def scan1_reference(
    s: Scan1Spec,
    x: Array,
    dt: Array,
    b: Array,
    c: Array,
    a: RawWeight,
    d: RawWeight,
    query_start: Array,
    kv_len: Array,
    state_slots: Array,
    state: Array,
) -> tuple[Array, Array]:
    """NumPy body: one token after the other, in float64."""
    decay, skip = a.dense().astype(np.float64), d.dense().reshape(-1)
    step = softplus(dt)  # [T, channels]
    y, after = np.empty(x.shape), state.copy()
    for row, slot in enumerate(state_slots):
        start, end = int(query_start[row]), int(query_start[row + 1])
        h = state[slot].astype(np.float64) if kv_len[row] > end - start else np.zeros(s.state)
        for t in range(start, end):
            h = np.exp(step[t][:, None] * decay) * h + (step[t] * x[t])[:, None] * b[t]
            y[t] = h @ c[t].astype(np.float64) + skip * x[t]
        after[slot] = h
    return y.astype(np.float32), after


def _make_scan1(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: Scan1Spec = case.spec
    tokens, ragged = drawn_sequences(case, rng)
    decay = quantize(-rng.uniform(0.5, 16, (s.channels, s.n_state)), GGMLType.F32)
    skip = draw.weight(rng, GGMLType.F32, 1, s.channels, 1.0)
    state = drawn_states(rng, ragged, *s.state)
    x, b, c = (draw.activations(rng, tokens, n) for n in (s.channels, s.n_state, s.n_state))
    dt, room = drawn_steps(case, rng, tokens, s.channels)
    return (x * room, dt, b, c, RawWeight(GGMLType.F32, decay, s.n_state), skip, *ragged, state)


def _scan1_strategy() -> Any:
    from hypothesis import strategies as st

    spec = st.builds(Scan1Spec, st.integers(1, 100), st.integers(1, 20))
    ragged = {"S": st.integers(1, 4), "Q": st.integers(1, 40), "extreme": st.integers(0, 1)}
    return st.builds(lambda spec, dims: Case(spec, dims), spec, st.fixed_dictionaries(ragged))


SCAN1 = Op(
    "scan1",
    Scan1Spec,
    lambda s: (
        Param("x", "act", "T channels"),
        Param("dt", "act", "T channels"),
        Param("b", "act", "T n_state"),
        Param("c", "act", "T n_state"),
        Param("a", "weight", "channels n_state"),
        Param("d", "weight", "channels"),
        *RAGGED,
        Param("state", "state"),
    ),
    lambda s: (Param("y", "act", "T channels"),),
    reference=scan1_reference,
    make=_make_scan1,
    strategy=_scan1_strategy,
    consumes="state",
    cases=lambda: [
        Case(Scan1Spec(64, 16), {"S": 1, "Q": 1}, "one step"),
        Case(Scan1Spec(96, 16), {"S": 3, "Q": 9}),
        Case(Scan1Spec(33, 5), {"S": 2, "Q": 140}, "odd sizes, longer than a chunk"),
        Case(Scan1Spec(40, 16), {"S": 3, "Q": 40, "extreme": 1}, "extreme steps"),
    ],
)


def scan1(b: Builder, x: Value, dt: Value, bc: tuple[Value, Value], a: WeightRef, d: WeightRef, state: StateRef) -> Value:
    """`[T, channels]`."""
    return b.emit(SCAN1, Scan1Spec(a.rows, a.k), x, dt, *bc, a, d, *step_inputs(b), state)[0]


@dataclass(frozen=True)
class GatedNormSpec:
    """`groups` runs of `k` channels, each normalised by itself."""

    groups: int
    k: int
    eps: float

    @property
    def width(self) -> int:
        return self.groups * self.k


def gated_norm_reference(s: GatedNormSpec, y: Array, z: Array, gain: RawWeight) -> tuple[Array]:
    """NumPy body."""
    u = (y * activate("silu", z)).reshape(len(y), s.groups, s.k)
    u = u / np.sqrt((u * u).mean(-1, keepdims=True) + s.eps) * gain.dense().reshape(s.groups, s.k)
    return (u.reshape(y.shape).astype(np.float32),)


def _make_gated_norm(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: GatedNormSpec = case.spec
    y, z = (draw.activations(rng, case.dims["T"], s.width) * 2 for _ in range(2))
    return y, z, draw.weight(rng, GGMLType.F32, s.groups, s.k, 1.0)


def _gated_norm_strategy() -> Any:
    from hypothesis import strategies as st

    spec = st.builds(GatedNormSpec, st.integers(1, 8), st.integers(1, 200), st.sampled_from([1e-6, 1e-5]))
    return st.builds(lambda s, t: Case(s, {"T": t}), spec, st.integers(1, 9))


GATED_NORM = Op(
    "gated_norm",
    GatedNormSpec,
    lambda s: (Param("y", "act", "T width"), Param("z", "act", "T width"), Param("gain", "weight", "groups k")),
    lambda s: (Param("out", "act", "T width"),),
    reference=gated_norm_reference,
    make=_make_gated_norm,
    strategy=_gated_norm_strategy,
    cases=lambda: [
        Case(GatedNormSpec(1, 512, 1e-5), {"T": 1}),
        Case(GatedNormSpec(8, 128, 1e-5), {"T": 5}),
        Case(GatedNormSpec(3, 77, 1e-6), {"T": 2}, "odd width"),
    ],
)


def gated_norm(b: Builder, y: Value, z: Value, gain: WeightRef, eps: float) -> Value:
    """`[T, groups * k]`."""
    return b.emit(GATED_NORM, GatedNormSpec(gain.rows, gain.k, eps), y, z, gain)[0]
