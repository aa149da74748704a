"""What the values of a case's activations may be besides ordinary, and what must hold of the results then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from quarrel.ops.compare import arrays_of, errors, roundings
from quarrel.ops.contract import Array, Case, Compute, Concrete, Op, rel_error
from quarrel.ops.reference import run_op
from quarrel.ops.rounding import ROUNDOFF
from quarrel.ops.step import Backend, ComputeChoice

KINDS = ("plain", "ties", "zeros", "tiny", "scaled", "nan", "inf")
HOMOGENEOUS = ("linear", "linear_add", "add", "rope", "norm", "norm_linear", "expert_down", "add_row", "gather_rows")
"""Ops whose results grow with their inputs, so that an error stays as large in proportion at any scale."""
SMALLEST: Mapping[Compute, float] = {"float32": 2.0**-130, "float16": 2.0**-23, "bfloat16": 2.0**-130, "int8": 2.0**-130}
"""Subnormal in the arithmetic, and exact in it."""
FLOOR: Mapping[Compute, float] = {"float32": 1e-30, "float16": 3e-5, "bfloat16": 1e-30, "int8": 1e-30}
"""Results below count as if they were so large: float16 ends at 6e-8, and hardware may take subnormals for zero."""


@dataclass(frozen=True)
class Twist:
    """What is done to the rows of activations; `amount` is a row (nan, inf) or a power of two (scaled)."""

    kind: str = "plain"
    amount: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.amount}"

    @classmethod
    def parse(cls, text: str) -> Twist:
        """From what `str` gives."""
        kind, _, amount = text.partition(":")
        return cls(kind, int(amount or 0))


def twists(op: Op) -> Any:
    """A strategy: half of the draws are plain, which is also what shrinking ends at."""
    kinds = [k for k in KINDS[1:] if k not in ("tiny", "scaled") or op.name in HOMOGENEOUS]
    twisted = st.builds(Twist, st.sampled_from(kinds), st.integers(-9, 5))
    return st.just(Twist()) | twisted


def rows_of(op: Op, spec: Any) -> list[tuple[int, str]]:
    """Which inputs are activations by row, and the name of that axis."""
    params = enumerate(op.params(spec))
    return [(i, p.axes[0]) for i, p in params if p.kind in ("act", "f32") and p.axes[:2] in ("T ", "R ")]


def check(backend: Backend, op: Op, case: Case, compute: ComputeChoice, twist: Twist, seed: int) -> None:
    """Runs the case with these values; AssertionError says what is wrong."""
    assert op.make is not None
    inputs = op.make(case, np.random.default_rng(seed))
    resolved = backend.compute_of(compute)
    changed = [i for i, _ in rows_of(op, case.spec)]
    if twist.kind in ("nan", "inf"):
        _check_poison(backend, op, case, compute, twist, inputs)
        return
    given = [_changed(np.asarray(x), twist, resolved) if i in changed else x for i, x in enumerate(inputs)]
    want = run_op(op, case.spec, given)
    got = backend.run_op(op, case.spec, given, compute)
    assert len(got) == len(want), f"{op.name} gave {len(got)} results, wanted {len(want)}"
    if twist.kind == "plain":
        found = errors(op, case.spec, got, want, case)
    else:
        floor = max(FLOOR[resolved], ROUNDOFF["float32"] * _size_of_states(op, case, given))
        found = {str(i): _error(g, w, floor) for i, (g, w) in enumerate(zip(arrays_of(got), arrays_of(want)))}
    sizes = [max(1, a.size) for a in arrays_of(want)]
    for i, ((name, error), size) in enumerate(zip(found.items(), sizes, strict=True)):
        # The tolerance is for the RMS of many values; the rounding of few scatters around it.
        allowed = op.tolerance[resolved] * (1 + 3 / math.sqrt(size))
        # A norm makes a row of ones of sums that cancelled to nearly nothing, so roundings may count for more.
        limit = allowed if error <= allowed else max(allowed, roundings(op, case.spec, given, want, resolved)[i])
        assert error <= limit, f"{op.name}.{name} is off by {error:.2e}, allowed {limit:.0e}"


def _size_of_states(op: Op, case: Case, given: Sequence[Concrete]) -> float:
    """RMS of the states before. What no token adds to becomes a product of decays, exp of a sum, which is off by as many
    roundings as that sum is large: what is left of a state below a rounding of what it was counts as nothing."""
    states = [np.asarray(x, np.float64) for p, x in zip(op.params(case.spec), given, strict=True) if p.kind == "state"]
    return max((float(np.sqrt(np.mean(x[np.isfinite(x)] ** 2))) for x in states if np.isfinite(x).any()), default=0.0)


def _changed(x: Array, twist: Twist, compute: Compute) -> Array:
    match twist.kind:
        case "ties":
            return np.round(x * 2) / np.float32(2)
        case "zeros":
            return np.zeros_like(x)
        case "tiny":
            return np.sign(x) * np.float32(SMALLEST[compute])
        case "scaled":
            return x * np.float32(2.0**twist.amount)
    return x


def _check_poison(
    backend: Backend, op: Op, case: Case, compute: ComputeChoice, twist: Twist, inputs: Sequence[Concrete]
) -> None:
    """A row that is not finite changes no bit of the rows of others."""
    found = [(i, axis) for i, axis in rows_of(op, case.spec) if np.asarray(inputs[i]).size]
    if not found:
        return
    index, axis = found[0]
    poisoned = np.array(inputs[index])
    row = twist.amount % len(poisoned)
    poisoned[row, abs(twist.amount) % poisoned.shape[1]] = np.nan if twist.kind == "nan" else np.inf
    others = np.arange(len(poisoned)) != row
    names = [p.name for p in op.params(case.spec)]
    if "query_start" in names:
        starts = np.asarray(inputs[names.index("query_start")])
        owner = np.searchsorted(starts, np.arange(len(poisoned)), side="right")
        others = owner != owner[row]
    clean = backend.run_op(op, case.spec, inputs, compute)
    got = backend.run_op(op, case.spec, [*inputs[:index], poisoned, *inputs[index + 1 :]], compute)
    for result, g, c in zip(op.results(case.spec), got, clean):
        if result.axes.startswith(axis):
            rows = (np.asarray(x)[others] for x in (g, c))
            same = np.array_equal(*(x.astype(np.float64) for x in rows), equal_nan=True)  # a case may have a NaN of its own
            assert same, f"{op.name}.{result.name} of other rows changes with row {row}, which is {twist.kind}"


def _error(got: Array, want: Array, floor: float) -> float:
    if want.dtype.kind in "iu":
        return 0.0 if np.array_equal(got, want) else float("inf")
    return rel_error(got, want, floor)
