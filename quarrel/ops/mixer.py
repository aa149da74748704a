"""Whole state-space mixers, from the projections of a row to what is projected back: composites that a backend may fuse.

    mamba2_mix:   gated_norm(scan2(conv(xbc), dt), z)       all of a Mamba-2 block between its two linear maps
    scan1_gate:   silu(z) * scan1(x, dt, B, C)              the end of a Mamba-1 block

Nothing is rounded on the way but where a backend keeps an intermediate result in the step's arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.ops import draw
from quarrel.ops.activation import GatedSpec, gated
from quarrel.ops.contract import Case, Concrete, Op, Operand, Param, StateRef, Value, WeightRef
from quarrel.ops.null import Builder
from quarrel.ops.state import (
    CONV,
    GATED_NORM,
    RAGGED,
    SCAN1,
    SCAN2,
    ConvSpec,
    GatedNormSpec,
    Scan1Spec,
    Scan2Spec,
    drawn_states,
    step_inputs,
)


@dataclass(frozen=True)
class Mamba2MixSpec:
    """A scan with `taps` of convolution before it and a norm of `eps` behind it, whose groups are its own."""

    scan: Scan2Spec
    taps: int
    eps: float
    conv_bias: bool = True

    @property
    def conv(self) -> ConvSpec:
        return ConvSpec(self.scan.width, self.taps, self.conv_bias)

    @property
    def norm(self) -> GatedNormSpec:
        return GatedNormSpec(self.scan.n_groups, self.group_width, self.eps)

    @property
    def tail(self) -> int:
        return self.taps - 1

    @property
    def width(self) -> int:
        return self.scan.width

    @property
    def d_inner(self) -> int:
        return self.scan.d_inner

    @property
    def n_heads(self) -> int:
        return self.scan.n_heads

    @property
    def head_dim(self) -> int:
        return self.scan.head_dim

    @property
    def n_state(self) -> int:
        return self.scan.n_state

    @property
    def n_groups(self) -> int:
        return self.scan.n_groups

    @property
    def group_width(self) -> int:
        return self.scan.d_inner // self.scan.n_groups


def _mamba2_expand(b: Builder, s: Mamba2MixSpec, inputs: Sequence[Operand]) -> Sequence[Value]:
    xbc, dt, z, *conv, dt_bias, a, d, gain, starts, keys, slots, conv_state, state = inputs
    ragged = (starts, keys, slots)
    (xbc,) = b.emit(CONV, s.conv, xbc, *conv, *ragged, conv_state)
    (y,) = b.emit(SCAN2, s.scan, xbc, dt, dt_bias, a, d, *ragged, state)
    return b.emit(GATED_NORM, s.norm, y, z, gain)


def _make_mamba2(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: Mamba2MixSpec = case.spec
    assert CONV.make is not None
    assert SCAN2.make is not None
    assert GATED_NORM.make is not None
    xbc, dt, dt_bias, a, d, *ragged, state = SCAN2.make(Case(s.scan, case.dims), rng)
    conv = CONV.make(Case(s.conv, {"S": 1, "Q": 1}), rng)[1 : 3 if s.conv_bias else 2]
    _, z, gain = GATED_NORM.make(Case(s.norm, {"T": len(dt)}), rng)  # type: ignore[arg-type]
    conv_state = drawn_states(rng, ragged, *s.conv.state)
    return (xbc, dt, z, *conv, dt_bias, a, d, gain, *ragged, conv_state, state)


def _mamba2_strategy() -> Any:
    from hypothesis import strategies as st

    def case(scan: Case, taps: int, eps: float, seqs: int, new: int) -> Case:
        return Case(Mamba2MixSpec(scan.spec, taps, eps), {**scan.dims, "S": seqs, "Q": new})

    assert SCAN2.strategy is not None
    sizes = (st.integers(2, 5), st.sampled_from([1e-6, 1e-5]), st.integers(1, 3), st.integers(1, 8))
    return st.builds(case, SCAN2.strategy(), *sizes)


MAMBA2_MIX = Op(
    "mamba2_mix",
    Mamba2MixSpec,
    lambda s: (
        Param("xbc", "act", "T width"),
        Param("dt", "act", "T n_heads"),
        Param("z", "act", "T d_inner"),
        Param("taps", "weight", "width taps"),
        *((Param("offset", "weight", "width"),) if s.conv_bias else ()),
        *(Param(name, "weight", "n_heads") for name in ("dt_bias", "a", "d")),
        Param("gain", "weight", "n_groups group_width"),
        *RAGGED,
        Param("conv_state", "state", "tail width"),
        Param("state", "state", "n_heads head_dim n_state"),
    ),
    lambda s: (Param("out", "act", "T d_inner"),),
    expand=_mamba2_expand,
    make=_make_mamba2,
    strategy=_mamba2_strategy,
    consumes="conv_state state",
    cases=lambda: [
        Case(Mamba2MixSpec(Scan2Spec(4, 64, 1, 32), 4, 1e-5), {"S": 1, "Q": 1}, "one step"),
        Case(Mamba2MixSpec(Scan2Spec(6, 32, 2, 16), 4, 1e-5), {"S": 5, "Q": 1}, "steps, groups"),
        Case(Mamba2MixSpec(Scan2Spec(2, 32, 2, 128), 4, 1e-5), {"S": 2, "Q": 90}, "longer than a chunk"),
        Case(Mamba2MixSpec(Scan2Spec(4, 32, 2, 16), 2, 1e-6), {"S": 5, "Q": 3}, "steps beside prompts"),
        Case(Mamba2MixSpec(Scan2Spec(5, 80, 1, 24), 3, 1e-6), {"S": 2, "Q": 4}, "odd sizes"),
        Case(Mamba2MixSpec(Scan2Spec(4, 32, 2, 16), 4, 1e-5, conv_bias=False), {"S": 3, "Q": 2}, "no bias"),
    ],
)


def mamba2_mix(
    b: Builder,
    spec: Mamba2MixSpec,
    rows: tuple[Value, Value, Value],
    conv_weights: tuple[WeightRef, ...],
    scan_weights: tuple[WeightRef, WeightRef, WeightRef],
    gain: WeightRef,
    states: tuple[StateRef, StateRef],
) -> Value:
    """`[T, d_inner]`. `rows` are xbc, dt and z; `conv_weights` taps and perhaps a bias; `scan_weights` dt_bias, A and D;
    `states` of convolution and scan."""
    return b.emit(MAMBA2_MIX, spec, *rows, *conv_weights, *scan_weights, gain, *step_inputs(b), *states)[0]


def _scan1_gate_expand(b: Builder, s: Scan1Spec, inputs: Sequence[Operand]) -> Sequence[Value]:
    z, *rest = inputs
    (y,) = b.emit(SCAN1, s, *rest)
    assert isinstance(z, Value)
    return (gated(b, GatedSpec("silu", s.channels), z, y),)


def _make_scan1_gate(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    assert SCAN1.make is not None
    rest = SCAN1.make(case, rng)
    return (draw.activations(rng, len(rest[0]), case.spec.channels), *rest)  # type: ignore[arg-type]


SCAN1_GATE = Op(
    "scan1_gate",
    Scan1Spec,
    lambda s: (Param("z", "act", "T channels"), *SCAN1.params(s)),
    lambda s: (Param("out", "act", "T channels"),),
    expand=_scan1_gate_expand,
    make=_make_scan1_gate,
    strategy=SCAN1.strategy,
    consumes="state",
    cases=lambda: [
        Case(Scan1Spec(64, 16), {"S": 3, "Q": 1}, "steps"),
        Case(Scan1Spec(96, 16), {"S": 2, "Q": 150}, "longer than a chunk"),
        Case(Scan1Spec(33, 5), {"S": 4, "Q": 40}, "odd sizes"),
    ],
)


def scan1_gate(
    b: Builder, z: Value, x: Value, dt: Value, bc: tuple[Value, Value], a: WeightRef, d: WeightRef, state: StateRef
) -> Value:
    """`silu(z)` times the scan, `[T, channels]`."""
    return b.emit(SCAN1_GATE, Scan1Spec(a.rows, a.k), z, x, dt, *bc, a, d, *step_inputs(b), state)[0]
