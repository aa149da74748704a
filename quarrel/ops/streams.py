"""A row of several residual streams, side by side (AltUp: Baykal et al. 2023, as Gemma 3n has it).

    pick_streams:   y[t, j] = x[t, first + j] * gain
    mix_streams:    y[t, j] = base[t, j] + sum_i (coefs[t, j, i] + offset) x[t, i]     of streams j >= first, base before
    match_streams:  y[t] = (ref, then each x[t, j] * rms(ref) / max(rms(x[t, j]), sqrt(least))), or the mean of them all

Everything is float32: streams are what layers add to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import Array, Case, Concrete, Op, Param, RawWeight, Value, WeightRef
from quarrel.ops.null import Builder


@dataclass(frozen=True)
class PickSpec:
    """`count` streams of `n` values, from the `first` of `streams` on, each times the same gain."""

    n: int
    streams: int
    first: int = 0
    count: int = 1

    @property
    def width(self) -> int:
        return self.n * self.streams

    @property
    def out_width(self) -> int:
        return self.n * self.count


def pick_reference(s: PickSpec, x: Array, gain: RawWeight) -> tuple[Array]:
    """NumPy body."""
    streams = x.reshape(len(x), s.streams, s.n)[:, s.first : s.first + s.count]
    return ((streams * gain.dense().reshape(-1)).astype(np.float32).reshape(len(x), s.out_width),)


def _pick_strategy() -> Any:
    from hypothesis import strategies as st

    def case(n: int, before: int, count: int, after: int, t: int) -> Case:
        return Case(PickSpec(n, before + count + after, before, count), {"T": t})

    return st.builds(case, st.integers(1, 300), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 9))


PICK_STREAMS = Op(
    "pick_streams",
    PickSpec,
    lambda s: (Param("x", "f32", "T width"), Param("gain", "weight", "n")),
    lambda s: (Param("y", "f32", "T out_width"),),
    reference=pick_reference,
    make=lambda c, rng: (
        draw.activations(rng, c.dims["T"], c.spec.width),
        draw.weight(rng, GGMLType.F32, 1, c.spec.n, 1.0),
    ),
    strategy=_pick_strategy,
    cases=lambda: [
        Case(PickSpec(77, 4), {"T": 3}, "the first"),
        Case(PickSpec(1030, 4, 1, 3), {"T": 2}, "all others"),
        Case(PickSpec(64, 3, 1, 1), {"T": 5}),
    ],
)


def pick_streams(b: Builder, x: Value, gain: WeightRef, streams: int, first: int = 0, count: int = 1) -> Value:
    """Some streams of `[T, streams * n]` times a gain `[n]`, `[T, count * n]`."""
    return b.emit(PICK_STREAMS, PickSpec(gain.k, streams, first, count), x, gain)[0]


@dataclass(frozen=True)
class MixSpec:
    """`streams` of `n` values, to which `inputs` others are added; without `coefs` all of them times the offset."""

    n: int
    streams: int
    inputs: int
    coefs: bool = True
    offset: float = 0.0
    first: int = 0

    @property
    def width(self) -> int:
        return self.n * self.streams

    @property
    def in_width(self) -> int:
        return self.n * self.inputs

    @property
    def pairs(self) -> int:
        return self.streams * self.inputs


def mix_reference(s: MixSpec, base: Array, x: Array, coefs: Array | None = None) -> tuple[Array]:
    """NumPy body, in float64."""
    rows = len(base)
    by = np.full((rows, s.streams, s.inputs), s.offset)
    if coefs is not None:
        by += coefs.reshape(by.shape)
    by[:, : s.first] = 0.0
    y = base.reshape(rows, s.streams, s.n) + by @ x.astype(np.float64).reshape(rows, s.inputs, s.n)
    return (y.astype(np.float32).reshape(base.shape),)


def _make_mix(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: MixSpec = case.spec
    return tuple(draw.activations(rng, case.dims["T"], w) for w in (s.width, s.in_width, s.pairs)[: 2 + s.coefs])


def _mix_strategy() -> Any:
    from hypothesis import strategies as st

    offset, first = st.sampled_from([0.0, 1.0, -0.5]), st.integers(0, 2)
    sizes = (st.integers(1, 300), st.integers(1, 5), st.integers(1, 4), st.booleans())
    return st.builds(lambda s, t: Case(s, {"T": t}), st.builds(MixSpec, *sizes, offset, first), st.integers(1, 9))


MIX_STREAMS = Op(
    "mix_streams",
    MixSpec,
    lambda s: (
        *(Param(name, "f32", axes) for name, axes in (("base", "T width"), ("x", "T in_width"))),
        *((Param("coefs", "f32", "T pairs"),) if s.coefs else ()),
    ),
    lambda s: (Param("y", "f32", "T width"),),
    reference=mix_reference,
    make=_make_mix,
    strategy=_mix_strategy,
    cases=lambda: [
        Case(MixSpec(96, 4, 4), {"T": 3}, "streams among themselves"),
        Case(MixSpec(1030, 4, 1, offset=1.0), {"T": 2}, "one to all"),
        Case(MixSpec(77, 4, 1, False, 1.0, 1), {"T": 5}, "one to all but the first"),
        Case(MixSpec(33, 3, 2, True, 0.5, 2), {"T": 1}),
    ],
)


def mix_streams(b: Builder, spec: MixSpec, base: Value, x: Value, coefs: Value | None = None) -> Value:
    """`base` and what is added to its streams, `[T, streams * n]`."""
    return b.emit(MIX_STREAMS, spec, base, x, *(() if coefs is None else (coefs,)))[0]


@dataclass(frozen=True)
class MatchSpec:
    """`streams` of `n` values, the first of them the one that the others are made as large as; with `mean` their mean."""

    n: int
    streams: int
    least: float
    mean: bool = False

    @property
    def rest(self) -> int:
        return self.n * (self.streams - 1)

    @property
    def out_width(self) -> int:
        return self.n * (1 if self.mean else self.streams)


def match_reference(s: MatchSpec, ref: Array, x: Array) -> tuple[Array]:
    """NumPy body, in float64."""
    first, others = (a.astype(np.float64).reshape(len(a), -1, s.n) for a in (ref, x))
    powers = [(a * a).mean(-1, keepdims=True) for a in (first, others)]
    matched = others * np.sqrt(powers[0] / np.maximum(powers[1], s.least))
    y = np.concatenate([first, matched], 1)
    return ((y.mean(1) if s.mean else y).astype(np.float32).reshape(len(ref), s.out_width),)


def _make_match(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: MatchSpec = case.spec
    x = draw.activations(rng, case.dims["T"], s.rest)
    x[-1] *= 1e-4  # less than the least
    return draw.activations(rng, case.dims["T"], s.n) * 3, x


def _match_strategy() -> Any:
    from hypothesis import strategies as st

    spec = st.builds(MatchSpec, st.integers(1, 300), st.integers(2, 5), st.sampled_from([1e-5, 1e-2]), st.booleans())
    return st.builds(lambda s, t: Case(s, {"T": t}), spec, st.integers(1, 9))


MATCH_STREAMS = Op(
    "match_streams",
    MatchSpec,
    lambda s: (Param("ref", "f32", "T n"), Param("x", "act", "T rest")),
    lambda s: (Param("y", "f32", "T out_width"),),
    reference=match_reference,
    make=_make_match,
    strategy=_match_strategy,
    cases=lambda: [
        Case(MatchSpec(96, 4, 1e-5), {"T": 3}),
        Case(MatchSpec(1030, 4, 1e-5, mean=True), {"T": 2}, "their mean"),
        Case(MatchSpec(7, 2, 1e-2), {"T": 9}),
    ],
)


def match_streams(b: Builder, ref: Value, x: Value, least: float = 1e-5, *, mean: bool = False) -> Value:
    """`ref` `[T, n]` and the streams of x made as large, `[T, streams * n]`; or their mean, `[T, n]`."""
    n = int(ref.dims[1])
    return b.emit(MATCH_STREAMS, MatchSpec(n, 1 + int(x.dims[1]) // n, least, mean), ref, x)[0]
