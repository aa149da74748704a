"""Rows picked by index: token embeddings out of packed weights, the positions whose results are wanted, and what an image
puts in the place of token embeddings.

embedding:    y[t] = scale * W[ids[t]]
gather_rows:  y[r] = x[rows[r]], or the n rows from there on side by side, or their mean
put_rows:     y[t] = source[put[t], start:start + k] where put[t] >= 0, else x[t]; with `add`, that is added to x[t]
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
from quarrel.ops.program import Program


@dataclass(frozen=True)
class EmbeddingSpec:
    """`ids` are below `n`; the result is float32, the first value of the residual stream."""

    type: GGMLType
    n: int
    k: int
    scale: float = 1.0


def embedding_reference(s: EmbeddingSpec, ids: Array, weight: RawWeight) -> tuple[Array]:
    """NumPy body."""
    rows = RawWeight(weight.type, weight.raw[ids], weight.k)
    return (rows.dense() * np.float32(s.scale),)


def _make(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: EmbeddingSpec = case.spec
    ids = rng.integers(0, s.n, case.dims["T"]).astype(np.int32)
    ids[-1] = s.n - 1
    return ids, draw.weight(rng, s.type, s.n, s.k)


def _strategy() -> Any:
    from hypothesis import strategies as st

    def case(type: GGMLType, n: int, blocks: int, t: int) -> Case:
        return Case(EmbeddingSpec(type, n, FORMATS[type].elements * blocks), {"T": t})

    return st.builds(case, st.sampled_from(WEIGHT_TYPES), st.integers(1, 50), st.integers(1, 4), st.integers(1, 9))


EMBEDDING = Op(
    "embedding",
    EmbeddingSpec,
    lambda s: (Param("ids", "i32", "T"), Param("weight", "weight", "n k")),
    lambda s: (Param("y", "f32", "T k"),),
    reference=embedding_reference,
    make=_make,
    cases=lambda: [Case(EmbeddingSpec(t, 19, 512, 12.0), {"T": 5}) for t in WEIGHT_TYPES],
    strategy=_strategy,
)


def embedding(b: Builder, ids: Value, w: WeightRef, scale: float = 1.0) -> Value:
    """Rows of `w` times `scale`, `[T, k]` float32."""
    return b.emit(EMBEDDING, EmbeddingSpec(w.type, w.rows, w.k, scale), ids, w)[0]


def vocabulary(program: Program) -> int:
    """Rows of the table that a program reads at its token ids; unlimited without one."""
    return _rows_read(program, "ids")


def table_of_positions(program: Program) -> int:
    """Rows of the table that a program reads at its positions; unlimited without one."""
    return _rows_read(program, "positions")


def _rows_read(program: Program, name: str) -> int:
    sizes = (n.spec.n for n in program.nodes if n.op is EMBEDDING and n.inputs[0] is program.inputs.get(name))
    return min(sizes, default=1 << 31)


@dataclass(frozen=True)
class GatherRowsSpec:
    """Rows of width `k`, `n` of them together: side by side, or with `mean` as their mean."""

    k: int
    n: int = 1
    mean: bool = False

    @property
    def width(self) -> int:
        return self.k if self.mean else self.n * self.k


def gather_rows_reference(s: GatherRowsSpec, x: Array, rows: Array) -> tuple[Array]:
    """NumPy body, means in float64."""
    together = x[rows[:, None] + np.arange(s.n)]  # [R, n, k]
    if s.mean:
        return (together.mean(1, dtype=np.float64).astype(np.float32),)
    return (together.reshape(len(rows), s.width),)


def _make_gather(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: GatherRowsSpec = case.spec
    tokens = case.dims["T"] + s.n - 1
    return draw.activations(rng, tokens, s.k), rng.integers(0, case.dims["T"], case.dims["R"]).astype(np.int32)


def _gather_strategy() -> Any:
    from hypothesis import strategies as st

    size = st.integers(1, 9)
    specs = st.builds(GatherRowsSpec, st.integers(1, 300), st.integers(1, 5), st.booleans())
    return st.builds(lambda spec, t, r: Case(spec, {"T": t, "R": r}), specs, size, size)


GATHER_ROWS = Op(
    "gather_rows",
    GatherRowsSpec,
    lambda s: (Param("x", "f32", "T k"), Param("rows", "i32", "R")),
    lambda s: (Param("y", "f32", "R width"),),
    reference=gather_rows_reference,
    make=_make_gather,
    cases=lambda: [
        Case(GatherRowsSpec(77), {"T": 5, "R": 1}),
        Case(GatherRowsSpec(256), {"T": 3, "R": 7}),
        Case(GatherRowsSpec(96, 4), {"T": 9, "R": 3}, "four side by side"),
        Case(GatherRowsSpec(77, 16, mean=True), {"T": 5, "R": 3}, "the mean of sixteen"),
    ],
    strategy=_gather_strategy,
)


def gather_rows(b: Builder, x: Value, rows: Value, n: int = 1, *, mean: bool = False) -> Value:
    """`x[rows]`, `[R, k]`; of the `n` rows from each on the mean, or all of them side by side, `[R, n * k]`."""
    return b.emit(GATHER_ROWS, GatherRowsSpec(int(x.dims[1]), n, mean), x, rows)[0]


@dataclass(frozen=True)
class PutRowsSpec:
    """Rows of width `k`, from column `start` of a source of `width`; in the place of what is there, or added to it."""

    k: int
    width: int
    start: int = 0
    add: bool = False


def put_rows_reference(s: PutRowsSpec, x: Array, put: Array, source: Array) -> tuple[Array]:
    """NumPy body."""
    there, y = put >= 0, x.copy()
    y[there] = source[put[there], s.start : s.start + s.k] + (x[there] if s.add else 0)
    return (y,)


def _make_put(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    s: PutRowsSpec = case.spec
    tokens = case.dims["T"]
    put = rng.integers(-1, tokens, tokens).astype(np.int32)
    put[0] = tokens - 1
    put[1::3] = -1
    source = draw.activations(rng, tokens, s.width)
    source[np.setdiff1d(np.arange(tokens), put)] = np.nan
    return draw.activations(rng, tokens, s.k), put, source


def _put_strategy() -> Any:
    from hypothesis import strategies as st

    def case(k: int, start: int, rest: int, add: bool, t: int) -> Case:
        return Case(PutRowsSpec(k, start + k + rest, start, add), {"T": t})

    odd = st.integers(0, 40)
    return st.builds(case, st.integers(1, 300), odd, odd, st.booleans(), st.integers(1, 9))


PUT_ROWS = Op(
    "put_rows",
    PutRowsSpec,
    lambda s: (Param("x", "f32", "T k"), Param("put", "i32", "T"), Param("source", "f32", "T width")),
    lambda s: (Param("y", "f32", "T k"),),
    reference=put_rows_reference,
    make=_make_put,
    cases=lambda: [
        Case(PutRowsSpec(77, 77), {"T": 7}),
        Case(PutRowsSpec(128, 384, 128, add=True), {"T": 9}, "added, a part"),
        Case(PutRowsSpec(512, 512), {"T": 1}, "one token"),
    ],
    strategy=_put_strategy,
)


def put_rows(b: Builder, x: Value, put: Value, source: Value, start: int = 0, *, add: bool = False) -> Value:
    """`x` with rows of `source` in it, or added to it: of token t row `put[t]`, none below 0. `[T, k]`."""
    spec = PutRowsSpec(int(x.dims[1]), int(source.dims[1]), start, add)
    return b.emit(PUT_ROWS, spec, x, put, source)[0]
