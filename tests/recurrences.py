"""Inputs of recurrent ops for tests that cut and join sequences; used with any backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from quarrel.gguf import GGMLType, quantize
from quarrel.ops import draw
from quarrel.ops.contract import Array, Case, Concrete, Op, Param, RawWeight
from quarrel.ops.reference import run_op
from quarrel.ops.step import Backend, ComputeChoice


def split(op: Op, spec: Any, inputs: tuple[Concrete, ...], sequences: list[tuple[int, int, int, int]]) -> tuple[Any, ...]:
    """The same inputs for other sequences: (first row, new rows, keys, slot) each. Rows are taken in that order."""
    rows = np.concatenate([np.arange(a, a + n) for a, n, _, _ in sequences])
    given: list[Concrete] = []
    for param, x in zip(op.params(spec), inputs, strict=True):
        if param.name == "query_start":
            x = np.cumsum([0, *(n for _, n, _, _ in sequences)]).astype(np.int32)
        elif param.name == "kv_len":
            x = np.array([keys for *_, keys, _ in sequences], np.int32)
        elif param.name == "state_slots":
            x = np.array([slot for *_, slot in sequences], np.int32)
        elif isinstance(x, np.ndarray) and param.kind == "act":
            x = np.ascontiguousarray(x[rows])
        given.append(x)
    return tuple(given)


def with_states(op: Op, spec: Any, inputs: tuple[Concrete, ...], states: tuple[Concrete, ...]) -> tuple[Concrete, ...]:
    """The inputs with other states."""
    left = list(states)
    return tuple(left.pop(0) if p.kind == "state" else x for p, x in zip(op.params(spec), inputs, strict=True))


def drawn(op: Op, spec: Any, seqs: int, new: int, seed: int = 0) -> tuple[Concrete, ...]:
    """Inputs of `seqs` sequences of exactly `new` rows, one behind the other, activations as float16 has them."""
    assert op.make is not None
    inputs = op.make(Case(spec, {"S": 1, "Q": seqs * new}), np.random.default_rng(seed))
    halves = tuple(
        x.astype(np.float16).astype(np.float32) if isinstance(x, np.ndarray) and p.kind == "act" else x
        for p, x in zip(op.params(spec), inputs, strict=True)
    )
    more = tuple(
        draw.activations(np.random.default_rng(seed), seqs + 2, *x.shape[1:])
        for p, x in zip(op.params(spec), inputs, strict=True)
        if p.kind == "state" and isinstance(x, np.ndarray)
    )
    return with_states(op, spec, halves, more)


def slow(op: Op, spec: Any, inputs: tuple[Concrete, ...]) -> tuple[Concrete, ...]:
    """The inputs with decays that remember hundreds of steps."""

    def decays(p: Param, x: Concrete) -> Concrete:
        if p.name != "a" or not isinstance(x, RawWeight):
            return x
        values = -np.geomspace(1e-2, 1.0, x.dense().size).astype(np.float32).reshape(len(x.raw), x.k)
        return RawWeight(GGMLType.F32, quantize(values, GGMLType.F32), x.k)

    return tuple(decays(p, x) for p, x in zip(op.params(spec), inputs, strict=True))


def parts_of_error(got: Array, want: Array, parts: int) -> list[float]:
    """Relative error in consecutive parts of the rows."""
    pairs = zip(np.array_split(np.asarray(got, np.float64), parts), np.array_split(np.asarray(want, np.float64), parts))
    return [float(np.sqrt(np.mean((g - w) ** 2) / np.mean(w**2))) for g, w in pairs]


def check_drift(backend: Backend, op: Op, spec: Any, steps: int, compute: ComputeChoice, limit: float) -> None:
    """One long sequence with a long memory: the error of results and state stays what it is in the first half."""
    inputs = slow(op, spec, drawn(op, spec, 1, steps))
    sequence = [(0, steps, steps, 1)]
    inputs = split(op, spec, inputs, sequence)
    want, got = run_op(op, spec, inputs), backend.run_op(op, spec, inputs, compute)
    found = parts_of_error(got[0], want[0], 8)  # type: ignore[arg-type]
    assert max(found) <= limit, found
    assert found[-1] <= 1.5 * max(found[:4]), found
    for after, right in zip(got[1:], want[1:], strict=True):
        assert parts_of_error(after[1:2], right[1:2], 1)[0] <= limit  # type: ignore[index]


def check_alone(backend: Backend, op: Op, spec: Any, compute: ComputeChoice) -> None:
    """Steps beside prompts and prompts beside steps give the bits that they give alone."""
    inputs = drawn(op, spec, 3, 100)
    together = [(0, 1, 9, 2), (1, 75, 75, 4), (80, 1, 1, 0), (90, 150, 190, 3)]
    got = backend.run_op(op, spec, split(op, spec, inputs, together), compute)
    begin = 0
    for sequence in together:
        alone = backend.run_op(op, spec, split(op, spec, inputs, [sequence]), compute)
        rows, slot = sequence[1], sequence[3]
        assert np.array_equal(got[0][begin : begin + rows], alone[0])  # type: ignore[index]
        for whole, one in zip(got[1:], alone[1:], strict=True):
            assert np.array_equal(whole[slot], one[slot])  # type: ignore[index]
        begin += rows


def check_cuts(backend: Backend, op: Op, spec: Any, compute: ComputeChoice, at: int) -> None:
    """A prompt of 3 * at + 5 tokens gives the same bits when it is cut at multiples of `at`."""
    total = 3 * at + 5
    inputs = drawn(op, spec, 1, total)
    whole = backend.run_op(op, spec, split(op, spec, inputs, [(0, total, total, 1)]), compute)
    rows: list[Any] = []
    states: tuple[Concrete, ...] = ()
    for begin, end in ((0, at), (at, 3 * at), (3 * at, total)):
        part = split(op, spec, inputs, [(begin, end - begin, end, 1)])
        result = backend.run_op(op, spec, with_states(op, spec, part, states) if states else part, compute)
        rows.append(result[0])
        states = result[1:]
    assert np.array_equal(np.concatenate(rows), whole[0])  # type: ignore[arg-type]
    for after, right in zip(states, whole[1:], strict=True):
        assert np.array_equal(after[1], right[1])  # type: ignore[index]


def check_fresh(backend: Backend, op: Op, spec: Any, compute: ComputeChoice) -> None:
    """A sequence that starts at position 0 sees nothing of what its slot held; one that goes on does."""
    inputs = drawn(op, spec, 2, 3)
    states = tuple(
        np.full(x.shape, np.nan, np.float32)
        for p, x in zip(op.params(spec), inputs, strict=True)
        if p.kind == "state"  # type: ignore[union-attr]
    )
    inputs = with_states(op, spec, inputs, states)
    for sequences in ([(0, 1, 1, 1), (1, 1, 2, 0)], [(0, 3, 3, 1), (3, 3, 4, 0)]):
        got = backend.run_op(op, spec, split(op, spec, inputs, sequences), compute)
        fresh = sequences[0][1]
        assert np.isfinite(got[0][:fresh]).all()  # type: ignore[index]
        assert not np.isfinite(got[0][fresh:]).any()  # type: ignore[index]
        assert all(np.isfinite(after[1]).all() for after in got[1:])  # type: ignore[index]
