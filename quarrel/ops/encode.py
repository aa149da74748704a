"""What encoders need beside the decoders' ops: attention without a cache, one row added to all, and pooling.

encode:   every token of a sequence sees every other, or those at most `reach` away; softmax(scale * q . k) v, within
          `query_start` bounds. Query head h reads key head h // (n_heads / n_kv)
add_row:  y[t] = x[t] + row
mean_rows: y[s] = the mean of rows `query_start[s]` to `query_start[s + 1]` of x, zero where there are none
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from quarrel.gguf import GGMLType
from quarrel.ops import draw
from quarrel.ops.contract import Array, Case, Concrete, Op, Param, RawWeight, Value, WeightRef
from quarrel.ops.null import Builder


@dataclass(frozen=True)
class EncodeSpec:
    """`n_heads` query heads of `head_dim`, and as many key and value heads, or `n_kv`. `reach` 0 is any distance."""

    n_heads: int
    head_dim: int
    scale: float
    n_kv: int = 0
    reach: int = 0

    @property
    def width(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def key_heads(self) -> int:
        return self.n_kv or self.n_heads

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_dim


def encode_reference(s: EncodeSpec, q: Array, k: Array, v: Array, query_start: Array) -> tuple[Array]:
    """NumPy body, in float64."""
    out = np.zeros((len(q), s.n_heads, s.head_dim))
    for start, end in pairwise(query_start):
        if start == end:
            continue
        heads = (a[start:end].reshape(end - start, -1, s.head_dim).astype(np.float64) for a in (q, k, v))
        qs, *kv = heads
        ks, vs = (np.repeat(a, s.n_heads // s.key_heads, 1) for a in kv)
        score = np.einsum("qhd,khd->hqk", qs, ks) * s.scale
        if s.reach:
            at = np.arange(end - start)
            score = np.where(np.abs(at[:, None] - at) <= s.reach, score, -np.inf)
        p = np.exp(score - score.max(-1, keepdims=True))
        out[start:end] = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), vs)
    return (out.reshape(q.shape).astype(np.float32),)


def _make_encode(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    lengths = rng.integers(1, case.dims["Q"] + 1, case.dims["S"])
    lengths[0] = case.dims["Q"]
    lengths = np.concatenate([lengths, np.zeros(case.dims.get("empty", 0), lengths.dtype)])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    s: EncodeSpec = case.spec
    q, k, v = (draw.activations(rng, int(lengths.sum()), width) for width in (s.width, s.key_width, s.key_width))
    return q, k, v, starts


def _encode_strategy() -> Any:
    from hypothesis import strategies as st

    def spec(n_kv: int, group: int, dim: int, reach: int) -> EncodeSpec:
        return EncodeSpec(n_kv * group, dim, 0.125, n_kv, reach)

    sizes = (st.sampled_from([16, 32, 64, 80, 96]), st.sampled_from([0, 1, 9, 40]))
    specs = st.builds(spec, st.integers(1, 3), st.integers(1, 3), *sizes)
    ragged = {"S": st.integers(1, 4), "Q": st.integers(1, 50)}
    return st.builds(lambda spec, dims: Case(spec, dims), specs, st.fixed_dictionaries(ragged))


ENCODE = Op(
    "encode",
    EncodeSpec,
    lambda s: (
        Param("q", "act", "T width"),
        *(Param(name, "act", "T key_width") for name in "kv"),
        Param("query_start", "i32", "S1"),
    ),
    lambda s: (Param("y", "act", "T width"),),
    reference=encode_reference,
    make=_make_encode,
    strategy=_encode_strategy,
    cases=lambda: [
        Case(EncodeSpec(4, 64, 0.125), {"S": 1, "Q": 1}, "one token"),
        Case(EncodeSpec(12, 32, 0.18), {"S": 3, "Q": 37}),
        Case(EncodeSpec(2, 80, 0.1), {"S": 2, "Q": 130}, "head_dim 80"),
        Case(EncodeSpec(3, 64, 0.1, 1, 9), {"S": 3, "Q": 90}, "some keys, one key head"),
        Case(EncodeSpec(2, 32, 0.1, 2, 300), {"S": 2, "Q": 50}, "a reach beyond all keys"),
        Case(EncodeSpec(2, 32, 0.1), {"S": 2, "Q": 40, "empty": 3}, "sequences of no token behind the others"),
    ],
)


def encode(b: Builder, spec: EncodeSpec, q: Value, k: Value, v: Value, starts: str = "query_start") -> Value:
    """`[T, n_heads * head_dim]`. starts: the input by which tokens are parted, `query_start` or `window_start`."""
    return b.emit(ENCODE, spec, q, k, v, b.input(starts))[0]


@dataclass(frozen=True)
class AddRowSpec:
    """Rows of `n`."""

    n: int


def add_row_reference(s: AddRowSpec, x: Array, row: RawWeight) -> tuple[Array]:
    """NumPy body."""
    return (x + row.dense().reshape(-1),)


def _add_row_strategy() -> Any:
    from hypothesis import strategies as st

    return st.builds(lambda n, t: Case(AddRowSpec(n), {"T": t}), st.integers(1, 300), st.integers(1, 9))


ADD_ROW = Op(
    "add_row",
    AddRowSpec,
    lambda s: (Param("x", "f32", "T n"), Param("row", "weight", "n")),
    lambda s: (Param("y", "f32", "T n"),),
    reference=add_row_reference,
    make=lambda c, rng: (draw.activations(rng, c.dims["T"], c.spec.n), draw.weight(rng, GGMLType.F32, 1, c.spec.n, 1.0)),
    cases=lambda: [Case(AddRowSpec(77), {"T": 3})],
    strategy=_add_row_strategy,
)


def add_row(b: Builder, x: Value, row: WeightRef) -> Value:
    """`x + row`, float32."""
    return b.emit(ADD_ROW, AddRowSpec(int(x.dims[1])), x, row)[0]


@dataclass(frozen=True)
class MeanRowsSpec:
    """Rows of width `k`."""

    k: int


def mean_rows_reference(s: MeanRowsSpec, x: Array, query_start: Array) -> tuple[Array]:
    """NumPy body, in float64."""
    sums = [x[start:end].sum(0, dtype=np.float64) / max(1, end - start) for start, end in pairwise(query_start)]
    return (np.array(sums, np.float32).reshape(-1, s.k),)


def _make_mean(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    lengths = rng.integers(1, case.dims["Q"] + 1, case.dims["S"])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return draw.activations(rng, int(lengths.sum()), case.spec.k), starts


def _mean_strategy() -> Any:
    from hypothesis import strategies as st

    sizes = st.fixed_dictionaries({"S": st.integers(1, 5), "Q": st.integers(1, 40)})
    return st.builds(lambda k, dims: Case(MeanRowsSpec(k), dims), st.integers(1, 300), sizes)


MEAN_ROWS = Op(
    "mean_rows",
    MeanRowsSpec,
    lambda s: (Param("x", "f32", "T k"), Param("query_start", "i32", "S1")),
    lambda s: (Param("y", "f32", "S k"),),
    reference=mean_rows_reference,
    make=_make_mean,
    cases=lambda: [
        Case(MeanRowsSpec(77), {"S": 1, "Q": 1}, "one token"),
        Case(MeanRowsSpec(384), {"S": 3, "Q": 70}),
    ],
    strategy=_mean_strategy,
)


def mean_rows(b: Builder, x: Value) -> Value:
    """The mean of each sequence's rows, `[S, k]` float32."""
    return b.emit(MEAN_ROWS, MeanRowsSpec(int(x.dims[1])), x, b.input("query_start"))[0]
