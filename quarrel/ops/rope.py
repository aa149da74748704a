"""Rotary position embedding (Su et al. 2021) on the first `n_rot` values of every head.

    angle = position * freq[i]
    (a, b) -> (a cos - b sin, a sin + b cos) * magnitude

`norm` rotates the pairs (2i, 2i + 1), `neox` the pairs (i, i + n_rot / 2); values past `n_rot` pass through. Every kind of
context scaling (linear, Llama 3, YaRN, longrope) is already in `freq` and `magnitude`.

With several `axes` a token has a position on each (time, row and column of an image), and each axis a row of `freq`, zero
where a pair does not follow it:

    angle = sum over the axes a of positions[a] * freq[a, i]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quarrel.ops import draw
from quarrel.ops.contract import Array, Case, Concrete, ConstRef, Op, Param, Value
from quarrel.ops.null import Builder


@dataclass(frozen=True)
class RopeSpec:
    """Static facts; `width` is `n_heads * head_dim`."""

    style: Literal["norm", "neox"]
    n_heads: int
    head_dim: int
    n_rot: int
    magnitude: float = 1.0
    axes: int = 1

    @property
    def width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def half(self) -> int:
        return self.n_rot // 2

    @property
    def n_freq(self) -> int:
        return self.axes * self.half

    @property
    def positions(self) -> Param:
        """What positions must be: `[T]`, or `[T, axes]` where there are several."""
        return Param("positions", "i32", "T" if self.axes == 1 else f"T {self.axes}")


def rope_reference(s: RopeSpec, x: Array, positions: Array, freq: Array) -> tuple[Array]:
    """NumPy body."""
    # The angle is rounded to float32 as every implementation does: at position 2^20 that is the larger error.
    angle = np.zeros((len(x), s.half), np.float32)
    for at, each in zip(positions.reshape(len(x), -1).T, freq.astype(np.float32).reshape(-1, s.half)):
        angle = angle + at.astype(np.float32)[:, None] * each  # [T, n_rot / 2]
    angle = angle.astype(np.float64)
    cos, sin = np.cos(angle)[:, None] * s.magnitude, np.sin(angle)[:, None] * s.magnitude
    heads = x.astype(np.float64).reshape(len(x), s.n_heads, s.head_dim)
    out = heads.copy()
    if s.style == "norm":
        first, second = slice(0, s.n_rot, 2), slice(1, s.n_rot, 2)
    else:
        first, second = slice(0, s.half), slice(s.half, s.n_rot)
    a, b = heads[..., first], heads[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return (out.reshape(x.shape).astype(np.float32),)


def _make(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: RopeSpec = case.spec
    positions, freq = draw_rotation(rng, s, case.dims["T"], case.dims.get("P", 4096))
    positions[0] = 0
    return draw.activations(rng, case.dims["T"], s.width), positions, freq


def draw_rotation(rng: np.random.Generator, s: RopeSpec, tokens: int, most: int) -> tuple[Array, Array]:
    """Positions below `most`, and frequencies, of which each pair has one axis's."""
    positions = rng.integers(0, most, (tokens, s.axes) if s.axes > 1 else tokens).astype(np.int32)
    freq = (10000.0 ** (-2.0 * np.arange(s.half) / s.n_rot)).astype(np.float32)
    return positions, np.where(np.arange(s.half) % s.axes == np.arange(s.axes)[:, None], freq, 0).reshape(-1)


def _strategy() -> Any:
    from hypothesis import strategies as st

    def case(style: Literal["norm", "neox"], heads: int, half: int, rest: int, axes: int, t: int) -> Case:
        return Case(RopeSpec(style, heads, 2 * half + rest, 2 * half, 1.25, axes), {"T": t})

    return st.builds(
        case,
        st.sampled_from(["norm", "neox"]),
        st.integers(1, 5),
        st.integers(1, 64),
        st.integers(0, 8),
        st.integers(1, 3),
        st.integers(1, 9),
    )


ROPE = Op(
    "rope",
    RopeSpec,
    lambda s: (Param("x", "act", "T width"), s.positions, Param("freq", "const", "n_freq")),
    lambda s: (Param("y", "act", "T width"),),
    reference=rope_reference,
    make=_make,
    cases=lambda: [
        Case(RopeSpec("norm", 4, 64, 64), {"T": 1}),
        Case(RopeSpec("norm", 3, 128, 128, 1.3), {"T": 7}),
        Case(RopeSpec("neox", 5, 80, 80), {"T": 5}, "head_dim 80"),
        Case(RopeSpec("neox", 2, 96, 48), {"T": 3}, "partial"),
        Case(RopeSpec("norm", 2, 64, 32), {"T": 3}, "partial"),
        Case(RopeSpec("neox", 3, 72, 72, axes=2), {"T": 5}, "rows and columns"),
        Case(RopeSpec("neox", 2, 64, 24, 1.25, 3), {"T": 5}, "three axes, partial"),
    ],
    strategy=_strategy,
)


def rotated_by(b: Builder, spec: RopeSpec) -> Value:
    """The step's positions as this rotation reads them: `positions`, or `places` on each of several axes."""
    return b.input("positions") if spec.axes == 1 else b.input("places", spec.axes)


def rope(b: Builder, spec: RopeSpec, x: Value, positions: Value, freq: ConstRef) -> Value:
    """`[T, n_heads * head_dim]` rotated by position, or by positions `[T, axes]`."""
    return b.emit(ROPE, spec, x, positions, freq)[0]
