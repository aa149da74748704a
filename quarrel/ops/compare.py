"""How far a backend's results for one case lie from the reference: the one measure of tests, fuzzers and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quarrel.ops.contract import Array, Case, Compute, Concrete, KVArrays, Op, RawWeight, rel_error
from quarrel.ops.kv import scaled, step_of
from quarrel.ops.reference import run_op
from quarrel.ops.rounding import shake_inputs
from quarrel.ops.step import Backend, ComputeChoice

SMALL, SIBLINGS = 64, 7
"""Fewer values than SMALL may cancel to nearly nothing in one draw: the size of SIBLINGS other draws counts too."""

ROWS, LEAST_ROW = 4.0, 16
"""How many tolerances one row may be off: it has fewer values than an array. With fewer than LEAST_ROW it says nothing."""

CONDITION = 3.0
"""An op's own error against that of one shaken reference; two draws of the same errors differ by a few percent."""
NOTHING = 0.5
"""A result that roundings change by so much is none."""


def errors(
    op: Op, spec: Any, got: Sequence[Concrete], want: Sequence[Concrete], case: Case | None = None
) -> dict[str, float]:
    """Relative error of every result, by name (a cache counts as two); for integers 0 if they are equal, else infinity.

    With `case`, what small results are measured against is found from other draws of it too.
    """
    names = [p.name for p in op.results(spec)] + list(op.consumed)
    got = [forgive_one_step(g, w) for g, w in zip(got, want, strict=True)]
    found: dict[str, float] = {}
    small = any(w.size < SMALL and w.dtype.kind == "f" for _, w in _arrays(names, want))
    usual = _usual_size(op, case) if small and case is not None else {}
    for (name, g), (_, w) in zip(_arrays(names, got), _arrays(names, want), strict=True):
        if w.dtype.kind in "iu":
            found[name] = 0.0 if np.array_equal(g, w) else float("inf")
        else:
            found[name] = rel_error(g, w, usual.get(name, 0.0) if w.size < SMALL else 0.0)
    return found


def row_error(op: Op, spec: Any, got: Sequence[Concrete], want: Sequence[Concrete]) -> float:
    """The largest error of one row among an op's results (of attention: of one head), over ROWS.

    One wrong row of thousands shows here, which the error of a whole array need not say.
    """
    head = getattr(spec, "latent", 0) or getattr(spec, "head_dim", 0) if op.name in ("attention", "encode") else 0
    pairs = [(g, w) for g, w in zip(got, want) if isinstance(g, np.ndarray) and isinstance(w, np.ndarray)]
    floats = [(g, w, head or w.shape[-1]) for g, w in pairs if w.dtype.kind == "f" and w.size]
    return max((_worst_row(g, w, width) / ROWS for g, w, width in floats if width >= LEAST_ROW), default=0.0)


def _worst_row(got: Array, want: Array, width: int) -> float:
    """RMS(got - want) of a run of `width` values, over its own RMS or a quarter of that of all values if that is more."""
    g, w = (np.asarray(a, np.float64).reshape(-1, width) for a in (got, want))
    ok = np.isfinite(w)
    if not np.array_equal(np.isfinite(g), ok):
        return float("inf")
    counts = np.maximum(ok.sum(1), 1)

    def sizes(values: Array) -> Array:
        return np.asarray(np.sqrt((np.where(ok, values, 0.0) ** 2).sum(1) / counts))

    with np.errstate(invalid="ignore"):
        off = sizes(np.where(ok, g - w, 0.0))
    own = sizes(w)
    whole = float(np.sqrt((own**2 * counts).sum() / counts.sum()))
    return float((off / np.maximum(np.maximum(own, whole / 4), 1e-30)).max())


def forgive_one_step(got: Concrete, want: Concrete) -> Concrete:
    """`got`, but `want` where a code of the cache is one step off: rounding may differ in the last bit."""
    if not isinstance(got, KVArrays) or not isinstance(want, KVArrays) or not scaled(want.type):
        return got
    pairs = ((got.k, want.k), (got.v, want.v))
    k, v = (np.where(np.abs(g - w) <= 1.01 * step_of(w, want.type), w, g) for g, w in pairs)
    return KVArrays(k, v, want.type)


def case_error(backend: Backend, op: Op, case: Case, compute: ComputeChoice, seed: int = 0) -> float:
    """The largest error among the results of one case that `backend` runs on inputs drawn from `seed`."""
    assert op.make is not None
    inputs = op.make(case, np.random.default_rng(seed))
    got = backend.run_op(op, case.spec, inputs, compute)
    return max(errors(op, case.spec, got, run_op(op, case.spec, inputs), case).values())


def check_case(backend: Backend, op: Op, case: Case, compute: ComputeChoice, seed: int = 0) -> None:
    """Runs one case on the backend; `AssertionError` says which result is off, by how much, and what was allowed."""
    assert op.make is not None
    inputs = op.make(case, np.random.default_rng(seed))
    want = run_op(op, case.spec, inputs)
    got = backend.run_op(op, case.spec, inputs, compute)
    assert len(got) == len(want), f"{op.name} gave {len(got)} results, wanted {len(want)}"
    resolved: Compute = backend.compute_of(compute)
    allowed = op.tolerance[resolved]
    for name, error in errors(op, case.spec, got, want, case).items():
        assert error <= allowed, f"{op.name}.{name} is off by {error:.2e} (allowed {allowed:.0e}) for {case}, seed {seed}"


def roundings(op: Op, spec: Any, inputs: Sequence[Concrete], want: Sequence[Concrete], compute: Compute) -> list[float]:
    """What each array of the results may be off by with these inputs, where the op's tolerance is for inputs of even size:
    CONDITION times what the reference itself makes of inputs that are off by a rounding."""
    with np.errstate(all="ignore"):
        shaken = run_op(op, spec, inputs, shake_inputs(compute, np.random.default_rng(0)))
    return [
        min(CONDITION * rel_error(s, w), NOTHING) if w.dtype.kind == "f" else 0.0
        for s, w in zip(arrays_of(shaken), arrays_of(want), strict=True)
    ]


def arrays_of(results: Sequence[Concrete]) -> list[Array]:
    """The results as arrays; a cache is two."""
    assert not any(isinstance(r, RawWeight) for r in results)
    return [a for r in results for a in ([r.k, r.v] if isinstance(r, KVArrays) else [np.asarray(r)])]


def _arrays(names: Sequence[str], results: Sequence[Concrete]) -> list[tuple[str, Array]]:
    named = [[f"{n}.k", f"{n}.v"] if isinstance(r, KVArrays) else [n] for n, r in zip(names, results, strict=False)]
    return list(zip([n for part in named for n in part], arrays_of(results[: len(named)]), strict=True))


def _usual_size(op: Op, case: Case) -> dict[str, float]:
    """Median RMS of each result over other draws of the same case."""
    assert op.make is not None
    names = [p.name for p in op.results(case.spec)] + list(op.consumed)
    sizes: dict[str, list[float]] = {}
    for seed in range(SIBLINGS):
        for name, w in _arrays(names, run_op(op, case.spec, op.make(case, np.random.default_rng([seed, SIBLINGS])))):
            values = np.asarray(w, np.float64)
            values = values[np.isfinite(values)]
            sizes.setdefault(name, []).append(float(np.sqrt(np.mean(values**2))) if values.size else 0.0)
    return {name: float(np.median(found)) for name, found in sizes.items()}
