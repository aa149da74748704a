"""Drawing the next token, the same on every backend.

Each row has its own temperature, top_k, top_p, min_p and one uniform number. In this order:

    temperature 0: the highest logit, the lowest id among equals
    p = softmax(logits / temperature)
    top_k   keeps the k most probable (ties at the k-th are all kept)
    min_p   keeps p >= min_p * max(p)
    top_p   keeps the most probable until their sum first reaches top_p (ties at the edge are all kept): of all, or, with a
            top_k, of what that and min_p have left, whose sum is then 1
    draw    inverse CDF in order of token id: the first id whose running sum of kept p exceeds uniform * total

Keeping all ties makes the kept set a threshold on p, with no order to disagree about. An infinite logit never wins. A row
with a NaN or with no finite logit gives -1, which the engine turns into an error for that request alone: it diverged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.ops.contract import Array, Case, Concrete, Op, Param, Value
from quarrel.ops.null import Builder


@dataclass(frozen=True)
class SampleSpec:
    """`n` logits a row."""

    n: int


def kept(p: Array, top_k: int, top_p: float, min_p: float) -> Array:
    """Mask of the tokens that may be drawn from probabilities `p` `[n]`, by threshold."""
    floor = min_p * p.max()
    if 0 < top_k < len(p):
        floor = max(floor, float(np.partition(p, len(p) - top_k)[len(p) - top_k]))
    if top_p < 1.0:
        alive = np.sort(p[p >= floor])[::-1] if top_k else np.sort(p)[::-1]
        total = alive.sum() if top_k else 1.0
        edge = int(np.searchsorted(np.cumsum(alive), top_p * total))
        floor = max(floor, float(alive[min(edge, len(alive) - 1)]))
    mask: Array = p >= floor
    return mask


def draw_token(logits: Array, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """One row, in float64."""
    finite = np.where(np.isfinite(logits), logits, -np.inf).astype(np.float64)
    best = int(finite.argmax())
    if finite[best] == -np.inf or np.isnan(logits).any():
        return -1
    return best if temperature <= 0.0 else draw_finite(finite, best, temperature, top_k, top_p, min_p, uniform)


def draw_finite(x: Array, best: int, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """One row of float64 without NaN or infinity (-inf is no token's), whose highest is at `best`."""
    p = np.exp(over(x - x[best], temperature))
    p /= p.sum()
    if top_k > 0 or top_p < 1.0 or min_p > 0.0:
        p = np.where(kept(p, top_k, top_p, min_p), p, 0.0)
    running = np.cumsum(p)
    at = int(np.searchsorted(running, uniform * running[-1], side="right"))
    return at if at < len(p) else int(np.flatnonzero(p)[-1])


def over(below: Array, temperature: float) -> Array:
    """Logits below the highest, by a temperature however small: what it makes of them may be minus infinity."""
    with np.errstate(over="ignore"):
        return np.asarray(below / temperature)


def sample_reference(
    s: SampleSpec, logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array, uniform: Array
) -> tuple[Array]:
    """NumPy body."""
    rows = zip(logits, temperature, top_k, top_p, min_p, uniform)
    drawn = [draw_token(x, float(t), int(k), float(p), float(m), float(u)) for x, t, k, p, m, u in rows]
    return (np.array(drawn, np.int32),)


def _make(case: Case, rng: np.random.Generator) -> tuple[Concrete, ...]:
    rows = case.dims["R"]
    logits = rng.standard_normal((rows, case.spec.n), dtype=np.float32) * 3
    if case.dims.get("broken"):  # every third row as it should be, every third without a finite value, the rest with a NaN
        logits[1::3] = rng.choice(np.array([-np.inf, np.inf], np.float32), logits[1::3].shape)
        logits[2::3, rng.integers(case.spec.n)] = np.nan
    temperature = rng.choice(np.array([0.0, 0.7, 1.3], np.float32), rows)
    top_k = rng.choice(np.array([0, 1, 5, 40], np.int32), rows)
    top_p = rng.choice(np.array([1.0, 0.9, 0.3], np.float32), rows)
    min_p = rng.choice(np.array([0.0, 0.05], np.float32), rows)
    return logits, temperature, top_k, top_p, min_p, rng.random(rows, dtype=np.float32)


def _strategy() -> Any:
    from hypothesis import strategies as st

    def case(n: int, rows: int, broken: int) -> Case:
        return Case(SampleSpec(n), {"R": rows, "broken": broken})

    return st.builds(case, st.integers(1, 3000), st.integers(1, 5), st.integers(0, 1))


_PER_ROW = ("temperature", "top_k", "top_p", "min_p", "uniform")

SAMPLE = Op(
    "sample",
    SampleSpec,
    lambda s: (
        Param("logits", "f32", "R n"),
        *(Param(name, "i32" if name == "top_k" else "f32", "R") for name in _PER_ROW),
    ),
    lambda s: (Param("tokens", "i32", "R"),),
    reference=sample_reference,
    make=_make,
    strategy=_strategy,
    cases=lambda: (
        [
            Case(SampleSpec(n), {"R": r}, note)
            for n, r, note in ((1, 1, "one token"), (100, 7, ""), (8193, 4, "past a power of two"), (32001, 2, ""))
        ]
        + [Case(SampleSpec(n), {"R": 6, "broken": 1}, "rows with NaN, and with nothing finite") for n in (77, 8193)]
    ),
)


def sample(b: Builder, logits: Value) -> Value:
    """Token ids `[R]`."""
    return b.emit(SAMPLE, SampleSpec(int(logits.dims[1])), logits, *(b.input(name) for name in _PER_ROW))[0]
