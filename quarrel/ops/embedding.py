"""Rows picked by index: token embeddings out of packed weights, and the positions whose results are wanted.

embedding:    y[t] = scale * W[ids[t]]
gather_rows:  y[r] = x[rows[r]]
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
    """Rows of width `k`."""

    k: int


def _gather_strategy() -> Any:
    from hypothesis import strategies as st

    size = st.integers(1, 9)
    return st.builds(lambda k, t, r: Case(GatherRowsSpec(k), {"T": t, "R": r}), st.integers(1, 300), size, size)


GATHER_ROWS = Op(
    "gather_rows",
    GatherRowsSpec,
    lambda s: (Param("x", "f32", "T k"), Param("rows", "i32", "R")),
    lambda s: (Param("y", "f32", "R k"),),
    reference=lambda s, x, rows: (x[rows],),
    make=lambda c, rng: (
        draw.activations(rng, c.dims["T"], c.spec.k),
        rng.integers(0, c.dims["T"], c.dims["R"]).astype(np.int32),
    ),
    cases=lambda: [Case(GatherRowsSpec(77), {"T": 5, "R": 1}), Case(GatherRowsSpec(256), {"T": 3, "R": 7})],
    strategy=_gather_strategy,
)


def gather_rows(b: Builder, x: Value, rows: Value) -> Value:
    """`x[rows]`, `[R, k]`."""
    return b.emit(GATHER_ROWS, GatherRowsSpec(int(x.dims[1])), x, rows)[0]
