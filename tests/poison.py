"""What one sequence must not see of another: rows of caches, slots of states and rows of a step that are not its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.attention import AttentionSpec
from quarrel.ops.contract import Array, Case, Concrete, KVArrays, Op
from quarrel.ops.delta import DELTA, DELTA_MIX
from quarrel.ops.embedding import EMBEDDING, PUT_ROWS
from quarrel.ops.kv import KV_TYPES, KVType
from quarrel.ops.mixer import MAMBA2_MIX, SCAN1_GATE
from quarrel.ops.state import CONV, SCAN1, SCAN2
from quarrel.ops.step import Backend, ComputeChoice

SPECS = (
    AttentionSpec(8, 2, 64, 0.125, window=37, sinks=True),
    AttentionSpec(4, 2, 80, 0.11, window=1),
    AttentionSpec(6, 2, 96, 0.1, cap=15.0),
    AttentionSpec(4, 4, 128, 0.09, window=33, cap=20.0),
    AttentionSpec(4, 2, 64, 0.125),
)
FORMS = (
    {"S": 3, "Q": 1, "KV": 300},  # decoding, over several splits
    {"S": 4, "Q": 5, "KV": 70},
    {"S": 2, "Q": 70, "KV": 0},  # prompts
    {"S": 4, "Q": 40, "KV": 150, "shared": 1},
)


def attention_cases(kept: tuple[KVType, ...]) -> list[Case]:
    """Every form with every spec, with what is kept of keys and values in turn."""
    pairs = [(spec, form) for spec in SPECS for form in FORMS]
    return [
        Case(spec, form | {"block_size": (16, 32)[i // 4 % 2], "kv": KV_TYPES.index(kept[i % len(kept)])})
        for i, (spec, form) in enumerate(pairs)
    ]


def recurrent_cases() -> list[tuple[Op, Case]]:
    """Several sequences of several tokens, some fresh."""
    ops = (CONV, SCAN1, SCAN2, MAMBA2_MIX, SCAN1_GATE, DELTA, DELTA_MIX)
    several = [(op, [c for c in op.cases() if c.dims["S"] > 1 and c.dims["Q"] > 1]) for op in ops]
    return [(op, min(cases, key=lambda c: c.dims["Q"])) for op, cases in several]


def check_poison(backend: Backend, op: Op, case: Case, compute: ComputeChoice, seed: int = 0) -> None:
    """The contract's cases hold NaN, infinities and 1e38 where nothing may be read: zeros there give the same bits. The
    first sequence then diverges, with all it has: the others' rows and states keep their bits."""
    assert op.make is not None
    inputs = op.make(case, np.random.default_rng(seed))
    params = op.params(case.spec)
    named: dict[str, Any] = {p.name: x for p, x in zip(params, inputs, strict=True)}
    want = backend.run_op(op, case.spec, [_without_poison(x) for x in inputs], compute)
    got = backend.run_op(op, case.spec, inputs, compute)
    assert np.isfinite(want[0]).all()  # type: ignore[arg-type]
    assert np.array_equal(got[0], want[0]), case  # type: ignore[arg-type]
    own = int(named["query_start"][1])
    broken: list[Concrete] = []
    for param, x in zip(params, inputs, strict=True):
        if isinstance(x, KVArrays) and not case.dims.get("shared"):
            k, v = (a.copy() for a in (x.k, x.v))
            k[named["block_table"][0]] = v[named["block_table"][0]] = np.nan
            x = KVArrays(k, v, x.type)
        elif isinstance(x, np.ndarray) and param.kind in ("act", "state"):
            x = x.copy()
            x[named["state_slots"][:1] if param.kind == "state" else slice(own)] = np.nan
        broken.append(x)
    got = backend.run_op(op, case.spec, broken, compute)
    assert np.isnan(got[0][:own]).any()  # type: ignore[index]
    assert np.array_equal(got[0][own:], want[0][own:]), case  # type: ignore[index]
    for after, right in zip(got[1:], want[1:], strict=True):
        others = named["state_slots"][1:]
        assert np.array_equal(after[others], right[others]), case  # type: ignore[index]


def row_cases() -> list[tuple[Op, Case]]:
    """An op that takes rows one by one and gives floats, with its first case of several rows."""
    found = []
    for op in {**ALL_OPS, **EXTRA_OPS}.values():
        for case in op.cases():
            rows = any(r.kind != "i32" and r.dims(case.spec)[0] == "T" for r in op.results(case.spec)[:1])
            floats = any(p.kind != "i32" and p.dims(case.spec)[0] == "T" for p in op.params(case.spec))
            of_sequences = {p.name for p in op.params(case.spec)} & {"query_start", "cache", "state"}
            others = op in (EMBEDDING, PUT_ROWS)  # of which a row need not show in the result
            if rows and floats and case.dims.get("T", 0) > 1 and not others and not of_sequences:
                found.append((op, case))
                break
    return found


def check_rows(backend: Backend, op: Op, case: Case, compute: ComputeChoice) -> None:
    """A NaN in a row shows in what becomes of that row, and in nothing else."""
    assert op.make is not None
    inputs = op.make(case, np.random.default_rng(0))
    row = case.dims["T"] // 2
    others = np.arange(case.dims["T"]) != row
    broken: list[Concrete] = []
    for param, x in zip(op.params(case.spec), inputs, strict=True):
        if isinstance(x, np.ndarray) and x.dtype == np.float32 and param.dims(case.spec)[0] == "T":
            x = x.copy()
            x[row] = np.nan
        broken.append(x)
    want, got = (backend.run_op(op, case.spec, x, compute) for x in (inputs, broken))
    for after, right in zip(got, want, strict=True):
        assert np.isnan(after[row]).any(), case  # type: ignore[index]
        assert np.array_equal(after[others], right[others]), case  # type: ignore[index]


def _without_poison(x: Concrete) -> Concrete:
    if isinstance(x, KVArrays):
        return KVArrays(_zeroed(x.k), _zeroed(x.v), x.type)
    return _zeroed(x) if isinstance(x, np.ndarray) and x.dtype == np.float32 else x


def _zeroed(x: Array) -> Array:
    zeroed: Array = np.where(np.abs(x) < 1e30, x, np.float32(0))
    return zeroed
