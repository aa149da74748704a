"""A linear map of each head's own.

    y[t, h] = (x[t, h, k:], W_h x[t, h, :k])

What multi-head latent attention does to a query before it meets compressed keys, and to compressed values afterwards
(DeepSeek-V2, 2024, absorbed form). The `rest` values behind the first k of a head, those for its rotated part, are passed
through and come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import Array, Case, Concrete, Op, Param, RawWeight, Value, WeightRef
from quarrel.ops.formats import WEIGHT_TYPES
from quarrel.ops.null import Builder


@dataclass(frozen=True)
class HeadLinearSpec:
    """`n_heads` matrices `[n, k]`, stacked as rows."""

    type: GGMLType
    n_heads: int
    n: int
    k: int
    rest: int = 0

    @property
    def rows(self) -> int:
        return self.n_heads * self.n

    @property
    def width(self) -> int:
        return self.n_heads * (self.k + self.rest)

    @property
    def out_width(self) -> int:
        return self.n_heads * (self.rest + self.n)


def head_linear_reference(s: HeadLinearSpec, x: Array, weight: RawWeight) -> tuple[Array]:
    """NumPy body, in float64."""
    heads = x.reshape(len(x), s.n_heads, s.k + s.rest).astype(np.float64)
    y = np.einsum("thk,hnk->thn", heads[..., : s.k], weight.dense().reshape(s.n_heads, s.n, s.k))
    return (np.concatenate([heads[..., s.k :], y], -1).reshape(len(x), s.out_width).astype(np.float32),)


def _make(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: HeadLinearSpec = case.spec
    return draw.activations(rng, case.dims["T"], s.width), draw.weight(rng, s.type, s.rows, s.k)


def _strategy() -> Any:
    from hypothesis import strategies as st

    def case(type: GGMLType, heads: int, n: int, blocks: int, rest: int, t: int) -> Case:
        return Case(HeadLinearSpec(type, heads, n, FORMATS[type].elements * blocks, rest), {"T": t})

    sizes = (st.integers(1, 5), st.integers(1, 70), st.integers(1, 3), st.sampled_from([0, 16, 64]), st.integers(1, 20))
    return st.builds(case, st.sampled_from(WEIGHT_TYPES), *sizes)


HEAD_LINEAR = Op(
    "head_linear",
    HeadLinearSpec,
    lambda s: (Param("x", "act", "T width"), Param("weight", "weight", "rows k")),
    lambda s: (Param("y", "act", "T out_width"),),
    reference=head_linear_reference,
    make=_make,
    strategy=_strategy,
    cases=lambda: [
        Case(HeadLinearSpec(GGMLType.Q8_0, 3, 67, 96, 32), {"T": 1}, "decode"),
        Case(HeadLinearSpec(GGMLType.Q4_0, 4, 64, 64, 16), {"T": 5}, "rest"),
        Case(HeadLinearSpec(GGMLType.Q4_K, 2, 130, 512), {"T": 19}, "values"),
        Case(HeadLinearSpec(GGMLType.F32, 3, 40, 80), {"T": 3}, "k not a multiple of 32"),
        Case(HeadLinearSpec(GGMLType.F16, 5, 33, 64, 8), {"T": 33}),
    ],
)


def head_linear(b: Builder, x: Value, w: WeightRef, n_heads: int, rest: int = 0) -> Value:
    """`[T, n_heads * (k + rest)]` to `[T, n_heads * (rest + n)]`; `w` `[n_heads * n, k]`."""
    spec = HeadLinearSpec(w.type, n_heads, w.rows // n_heads, w.k, rest)
    return b.emit(HEAD_LINEAR, spec, x, w)[0]
