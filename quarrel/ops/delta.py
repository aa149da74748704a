"""Gated delta nets: a linear attention whose state forgets and corrects itself (Yang, Kautz and Hatamizadeh 2024).

A value head h has a state M, float32 `[v_dim, k_dim]`, and reads the query and key of head h mod n_k, or h // (n_v / n_k)
where the value heads of one key lie side by side. With q and k divided by sqrt(sum of squares + eps), a token does

    M = exp(a[h] * softplus(alpha[t, h] + dt_bias[h])) * M           forget
    M = M + sigmoid(beta[t, h]) * (v - M k) k^T                      correct what the state predicts for the key
    y[t, h] = M q / sqrt(k_dim)                                      read

delta_mix:  a whole mixer between its linear maps: conv of q, k and v; delta; RMS norm of every head; times silu(z)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.gguf import GGMLType, quantize
from quarrel.ops import draw
from quarrel.ops.activation import GatedSpec, gated, sigmoid
from quarrel.ops.contract import Array, Case, Concrete, Op, Operand, Param, RawWeight, StateRef, Value, WeightRef
from quarrel.ops.norm import NormSpec, norm
from quarrel.ops.null import Builder
from quarrel.ops.state import CONV, RAGGED, ConvSpec, drawn_sequences, drawn_states, drawn_steps, softplus, step_inputs


@dataclass(frozen=True)
class DeltaSpec:
    """`n_k` heads of queries and keys, `n_v` of values; `grouped` if the value heads of one key lie side by side."""

    n_k: int
    n_v: int
    k_dim: int
    v_dim: int
    eps: float
    grouped: bool = False

    @property
    def width(self) -> int:
        """Channels of queries, keys and values together."""
        return 2 * self.n_k * self.k_dim + self.n_v * self.v_dim

    @property
    def d_inner(self) -> int:
        return self.n_v * self.v_dim

    @property
    def state(self) -> tuple[int, int, int]:
        return (self.n_v, self.v_dim, self.k_dim)

    def of_values(self, heads: Array) -> Array:
        """`[.., n_k, n]` as `[.., n_v, n]`: every value head's key."""
        each = self.n_v // self.n_k
        return heads.repeat(each, -2) if self.grouped else np.concatenate([heads] * each, -2)


def delta_reference(
    s: DeltaSpec,
    qkv: Array,
    alpha: Array,
    beta: Array,
    dt_bias: RawWeight,
    a: RawWeight,
    query_start: Array,
    kv_len: Array,
    state_slots: Array,
    state: Array,
) -> tuple[Array, Array]:
    """NumPy body: one token after the other, in float64."""
    rows = qkv.astype(np.float64)
    qk = rows[:, : s.width - s.d_inner].reshape(-1, 2, s.n_k, s.k_dim)
    qk = s.of_values(qk / np.sqrt((qk * qk).sum(-1, keepdims=True) + s.eps))  # [T, 2, n_v, k_dim]
    v = rows[:, s.width - s.d_inner :].reshape(-1, s.n_v, s.v_dim)
    keep = np.exp(a.dense().reshape(-1) * softplus(alpha + dt_bias.dense().reshape(-1)))  # [T, n_v]
    rate = sigmoid(beta.astype(np.float64))
    y, after = np.empty(v.shape), state.copy()
    for row, slot in enumerate(state_slots):
        start, end = int(query_start[row]), int(query_start[row + 1])
        m = state[slot].astype(np.float64) if kv_len[row] > end - start else np.zeros(s.state)
        for t in range(start, end):
            q, k = qk[t]
            m = m * keep[t][:, None, None]
            wrong = v[t] - np.einsum("hvk,hk->hv", m, k)
            m = m + rate[t][:, None, None] * wrong[..., None] * k[:, None, :]
            y[t] = np.einsum("hvk,hk->hv", m, q) / np.sqrt(s.k_dim)
        after[slot] = m
    return y.reshape(len(qkv), s.d_inner).astype(np.float32), after


def _make_delta(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: DeltaSpec = case.spec
    tokens, ragged = drawn_sequences(case, rng)
    decay = RawWeight(GGMLType.F32, quantize(-rng.uniform(0.1, 4, (1, s.n_v)), GGMLType.F32), s.n_v)
    state = drawn_states(rng, ragged, *s.state)
    qkv = draw.activations(rng, tokens, s.width)
    if case.dims.get("alike"):  # one key over and over, as a repeated token has
        keys = slice(s.n_k * s.k_dim, s.width - s.d_inner)
        qkv[:, keys] = qkv[:1, keys] * np.where(rng.random((tokens, 1)) < 0.1, 0, 1)
    alpha, _ = drawn_steps(case, rng, tokens, s.n_v)
    beta = draw.activations(rng, tokens, s.n_v) * (20 if case.dims.get("extreme") else 2)
    return (qkv, alpha, beta, draw.weight(rng, GGMLType.F32, 1, s.n_v, 1.0), decay, *ragged, state)


def _delta_strategy() -> Any:
    from hypothesis import strategies as st

    def build(n_k: int, per: int, k_dim: int, v_dim: int, grouped: bool) -> DeltaSpec:
        return DeltaSpec(n_k, n_k * per, k_dim, v_dim, 1e-6, grouped)

    dims = st.sampled_from([8, 24, 32, 64, 80, 128])
    spec = st.builds(build, st.integers(1, 3), st.integers(1, 3), dims, dims, st.booleans())
    flags = {"extreme": st.integers(0, 1), "alike": st.integers(0, 1)}
    ragged = {"S": st.integers(1, 4), "Q": st.integers(1, 40), **flags}
    return st.builds(lambda spec, dims: Case(spec, dims), spec, st.fixed_dictionaries(ragged))


DELTA = Op(
    "delta",
    DeltaSpec,
    lambda s: (
        Param("qkv", "act", "T width"),
        Param("alpha", "act", "T n_v"),
        Param("beta", "act", "T n_v"),
        Param("dt_bias", "weight", "n_v"),
        Param("a", "weight", "n_v"),
        *RAGGED,
        Param("state", "state", "n_v v_dim k_dim"),
    ),
    lambda s: (Param("y", "act", "T d_inner"),),
    reference=delta_reference,
    make=_make_delta,
    strategy=_delta_strategy,
    consumes="state",
    cases=lambda: [
        Case(DeltaSpec(2, 4, 64, 32, 1e-6), {"S": 1, "Q": 1}, "one step"),
        Case(DeltaSpec(2, 6, 32, 32, 1e-6), {"S": 3, "Q": 9}, "three value heads a key"),
        Case(DeltaSpec(2, 4, 32, 64, 1e-6, grouped=True), {"S": 2, "Q": 90}, "longer than a chunk, grouped"),
        Case(DeltaSpec(1, 2, 32, 32, 1e-6), {"S": 3, "Q": 80, "extreme": 1}, "extreme steps"),
        Case(DeltaSpec(1, 1, 64, 32, 1e-6), {"S": 2, "Q": 70, "alike": 1}, "one key over and over"),
        Case(DeltaSpec(1, 3, 20, 12, 1e-5), {"S": 2, "Q": 4}, "odd sizes"),
    ],
)


@dataclass(frozen=True)
class DeltaMixSpec:
    """The delta rule with `taps` of convolution before it and a norm of `eps` behind it."""

    delta: DeltaSpec
    taps: int
    eps: float
    conv_bias: bool = False

    @property
    def conv(self) -> ConvSpec:
        return ConvSpec(self.delta.width, self.taps, self.conv_bias)

    @property
    def norm(self) -> NormSpec:
        return NormSpec("rms", self.delta.v_dim, self.eps, groups=self.delta.n_v)

    @property
    def tail(self) -> int:
        return self.taps - 1

    @property
    def width(self) -> int:
        return self.delta.width

    @property
    def d_inner(self) -> int:
        return self.delta.d_inner

    @property
    def n_v(self) -> int:
        return self.delta.n_v

    @property
    def v_dim(self) -> int:
        return self.delta.v_dim

    @property
    def k_dim(self) -> int:
        return self.delta.k_dim


def _mix_expand(b: Builder, s: DeltaMixSpec, inputs: Sequence[Operand]) -> Sequence[Value]:
    qkv, alpha, beta, z, *conv, dt_bias, a, gain, starts, keys, slots, conv_state, state = inputs
    assert isinstance(z, Value)
    ragged = (starts, keys, slots)
    (qkv,) = b.emit(CONV, s.conv, qkv, *conv, *ragged, conv_state)
    (y,) = b.emit(DELTA, s.delta, qkv, alpha, beta, dt_bias, a, *ragged, state)
    return (gated(b, GatedSpec("silu", s.d_inner), z, norm(b, s.norm, y, gain)),)


def _make_mix(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: DeltaMixSpec = case.spec
    assert CONV.make is not None
    qkv, alpha, beta, dt_bias, a, *ragged, state = _make_delta(Case(s.delta, case.dims), rng)
    conv = CONV.make(Case(s.conv, {"S": 1, "Q": 1}), rng)[1 : 3 if s.conv_bias else 2]
    z = draw.activations(rng, len(qkv), s.d_inner) * 2  # type: ignore[arg-type]
    gain = draw.weight(rng, GGMLType.F32, 1, s.v_dim, 1.0)
    conv_state = drawn_states(rng, ragged, *s.conv.state)
    return (qkv, alpha, beta, z, *conv, dt_bias, a, gain, *ragged, conv_state, state)


def _mix_strategy() -> Any:
    from hypothesis import strategies as st

    def case(delta: Case, taps: int, bias: bool, seqs: int, new: int) -> Case:
        return Case(DeltaMixSpec(delta.spec, taps, 1e-6, bias), {**delta.dims, "S": seqs, "Q": new})

    return st.builds(case, _delta_strategy(), st.integers(2, 5), st.booleans(), st.integers(1, 3), st.integers(1, 8))


DELTA_MIX = Op(
    "delta_mix",
    DeltaMixSpec,
    lambda s: (
        Param("qkv", "act", "T width"),
        Param("alpha", "act", "T n_v"),
        Param("beta", "act", "T n_v"),
        Param("z", "act", "T d_inner"),
        Param("taps", "weight", "width taps"),
        *((Param("offset", "weight", "width"),) if s.conv_bias else ()),
        Param("dt_bias", "weight", "n_v"),
        Param("a", "weight", "n_v"),
        Param("gain", "weight", "v_dim"),
        *RAGGED,
        Param("conv_state", "state", "tail width"),
        Param("state", "state", "n_v v_dim k_dim"),
    ),
    lambda s: (Param("out", "act", "T d_inner"),),
    expand=_mix_expand,
    make=_make_mix,
    strategy=_mix_strategy,
    consumes="conv_state state",
    cases=lambda: [
        Case(DeltaMixSpec(DeltaSpec(2, 4, 64, 32, 1e-6), 4, 1e-6), {"S": 1, "Q": 1}, "one step"),
        Case(DeltaMixSpec(DeltaSpec(2, 6, 32, 32, 1e-6), 4, 1e-6), {"S": 5, "Q": 1}, "steps, three heads a key"),
        Case(DeltaMixSpec(DeltaSpec(2, 4, 32, 64, 1e-6, grouped=True), 4, 1e-6), {"S": 4, "Q": 3}, "beside prompts"),
        Case(DeltaMixSpec(DeltaSpec(1, 2, 32, 32, 1e-6), 4, 1e-6), {"S": 2, "Q": 90}, "longer than a chunk"),
        Case(DeltaMixSpec(DeltaSpec(1, 3, 80, 24, 1e-5), 3, 1e-5, True), {"S": 3, "Q": 2}, "odd sizes, a bias"),
    ],
)


def delta_mix(
    b: Builder,
    spec: DeltaMixSpec,
    rows: tuple[Value, Value, Value, Value],
    conv_weights: tuple[WeightRef, ...],
    delta_weights: tuple[WeightRef, WeightRef],
    gain: WeightRef,
    states: tuple[StateRef, StateRef],
) -> Value:
    """`[T, d_inner]`. `rows` are qkv, alpha, beta and z; `conv_weights` taps and perhaps a bias; `delta_weights` dt_bias
    and a; `states` of convolution and delta rule."""
    return b.emit(DELTA_MIX, spec, *rows, *conv_weights, *delta_weights, gain, *step_inputs(b), *states)[0]
