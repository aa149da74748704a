"""A factor for each row, by its position: how attention sharpens with length (Llama 4, Mistral 3).

    y[t] = factors[min((positions[t] + shift) / size, n - 1)]      rounded down

Llama 4 has 1 + 0.1 ln(1 + i) for the i-th 8192 tokens. A model multiplies queries by it (`gated`, with one gate a row).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.ops.contract import Array, Case, Concrete, ConstRef, Op, Param, Value
from quarrel.ops.null import Builder

MOST_POSITIONS = 1 << 30


@dataclass(frozen=True)
class ByPositionSpec:
    """`n` factors, each for `size` positions; the first is for `shift` fewer."""

    n: int
    size: int
    shift: int = 0


def by_position_reference(s: ByPositionSpec, positions: Array, factors: Array) -> tuple[Array]:
    """NumPy body."""
    return (factors[np.minimum((positions + s.shift) // s.size, s.n - 1)].astype(np.float32)[:, None],)


def _make(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: ByPositionSpec = case.spec
    positions = rng.integers(0, s.n * s.size + 2, case.dims["T"]).astype(np.int32)
    positions[::3] = s.size - s.shift
    positions[1::3] -= positions[1::3] % s.size
    return positions, rng.standard_normal(s.n).astype(np.float32)


def _strategy() -> Any:
    from hypothesis import strategies as st

    spec = st.builds(ByPositionSpec, st.integers(1, 40), st.integers(1, 9000), st.integers(0, 1))
    return st.builds(lambda s, t: Case(s, {"T": t}), spec, st.integers(1, 300))


BY_POSITION = Op(
    "by_position",
    ByPositionSpec,
    lambda s: (Param("positions", "i32", "T"), Param("factors", "const", "n")),
    lambda s: (Param("y", "f32", "T 1"),),
    reference=by_position_reference,
    make=_make,
    strategy=_strategy,
    cases=lambda: [
        Case(ByPositionSpec(5, 8192, 1), {"T": 9}),
        Case(ByPositionSpec(17, 16), {"T": 300}),
        Case(ByPositionSpec(1, 7), {"T": 1}, "one factor for all"),
    ],
)


def by_position(b: Builder, factors: tuple[float, ...], size: int, shift: int = 0) -> Value:
    """The factor of each of the step's rows, `[T, 1]`."""
    spec = ByPositionSpec(len(factors), size, shift)
    return b.emit(BY_POSITION, spec, b.input("positions"), ConstRef("by_position", factors))[0]
