"""How likely the drawn token was, and the best of its row: what is returned of a row of logits instead of the row.

    total          log(sum over j of exp(logits[j]))
    best           the `top` ids of the highest logits, the highest first; ids rise among equals
    logprobs[0]    logits[token] - total
    logprobs[1:]   logits[best] - total

These are the model's own probabilities, before any sampling setting. An infinite logit counts as minus infinity, as in
`sample`, and so does its log probability. A row that drew no token (-1), as one with a NaN does, has none: minus
infinity and ids of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.ops.contract import Array, Case, Concrete, Op, Param, Value
from quarrel.ops.null import Builder

MOST_LOGPROBS = 20
"""Of a row that are returned, as OpenAI's interface allows."""


@dataclass(frozen=True)
class LogprobsSpec:
    """`n` logits a row, of which the best `top` are returned."""

    n: int
    top: int

    @property
    def n_values(self) -> int:
        """Log probabilities of a row: the token's and the best ones'."""
        return 1 + self.top


def logprobs_reference(s: LogprobsSpec, logits: Array, tokens: Array) -> tuple[Array, Array]:
    """NumPy body, in float64."""
    values = np.full((len(logits), s.n_values), -np.inf, np.float32)
    best = np.zeros((len(logits), s.top), np.int32)
    for row in np.flatnonzero(tokens >= 0):
        x = np.where(np.isfinite(logits[row]), logits[row], -np.inf).astype(np.float64)
        best[row] = np.argsort(-x, kind="stable")[: s.top]
        x -= x.max()
        values[row] = x[[tokens[row], *best[row]]] - np.log(np.exp(x).sum())
    return values, best


def _make(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    rows, n = case.dims["R"], case.spec.n
    logits = rng.standard_normal((rows, n), dtype=np.float32) * 3
    tokens = rng.integers(n, size=rows, dtype=np.int32)
    if case.dims.get("odd"):  # equals; a row of them; few that are finite; a row without a number, which draws nothing
        logits[0::4] = np.round(logits[0::4] / 2) * 2
        logits[1::4] = -0.0
        logits[1::4, ::2] = 0.0
        logits[2::4] = rng.choice(np.array([-np.inf, np.inf], np.float32), logits[2::4].shape)
        logits[2::4, rng.integers(n)] = -7.0
        logits[3::4, rng.integers(n)] = np.nan
        tokens[3::4] = -1
    return logits, tokens


def _strategy() -> Any:
    from hypothesis import strategies as st

    def case(n: int, top: int, rows: int, odd: int) -> Case:
        return Case(LogprobsSpec(n, min(top, n)), {"R": rows, "odd": odd})

    return st.builds(case, st.integers(1, 3000), st.integers(1, MOST_LOGPROBS), st.integers(1, 5), st.integers(0, 1))


LOGPROBS = Op(
    "logprobs",
    LogprobsSpec,
    lambda s: (Param("logits", "f32", "R n"), Param("tokens", "i32", "R")),
    lambda s: (Param("logprobs", "f32", "R n_values"), Param("best", "i32", "R top")),
    reference=logprobs_reference,
    make=_make,
    strategy=_strategy,
    cases=lambda: (
        [
            Case(LogprobsSpec(n, top), {"R": r}, note)
            for n, top, r, note in (
                (1, 1, 1, "one token"),
                (100, 20, 7, ""),
                (8193, 20, 3, "past a power of two"),
                (32001, 5, 2, ""),
                (2048, 20, 3, "a power of two"),
            )
        ]
        + [Case(LogprobsSpec(n, min(20, n)), {"R": 5, "odd": 1}, "equals, infinities and NaN") for n in (9, 77, 8193)]
    ),
)


def logprobs(b: Builder, logits: Value, tokens: Value) -> tuple[Value, Value]:
    """Log probabilities `[R, 1 + top]` of the tokens and of the best, whose ids `[R, top]` follow."""
    n = int(logits.dims[1])
    values, best = b.emit(LOGPROBS, LogprobsSpec(n, min(MOST_LOGPROBS, n)), logits, tokens)
    return values, best
