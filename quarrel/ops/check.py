"""QUARREL_CHECK=1: a step that runs op by op and compares every result with the op's NumPy reference.

Each op gets what the backend's own ops before it made, so an error is reported where it arises and not where it ends
up. Composites that the backend takes whole are compared whole; what it declines is expanded, as `compile` would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quarrel.errors import QuarrelError, RequestError, UnsupportedOp
from quarrel.ops import reference
from quarrel.ops.compare import arrays_of, forgive_one_step, roundings
from quarrel.ops.contract import (
    Array,
    CacheRef,
    Concrete,
    ConstRef,
    KVArrays,
    Operand,
    StateRef,
    Value,
    WeightRef,
    rel_error,
)
from quarrel.ops.embedding import vocabulary
from quarrel.ops.null import expand
from quarrel.ops.program import Node, Program
from quarrel.ops.sample import SAMPLE
from quarrel.ops.step import (
    Backend,
    ComputeChoice,
    Done,
    ExplainLine,
    Limits,
    MemoryPlan,
    StepInputs,
    StepOutputs,
    Want,
    WeightSource,
    outputs_of,
    results_of,
    with_ids,
)

DRAW_SLACK = 1e-4
"""How far a uniform number or a cut may be off before another token counts as wrong: float32 sums over a vocabulary."""


class CheckedStep:
    """A `Step` on any backend through `run_op`, with its caches in host memory. Slow: for hunting wrong results."""

    def __init__(
        self, backend: Backend, program: Program, weights: WeightSource, limits: Limits, compute: ComputeChoice = "auto"
    ) -> None:
        self.limits = limits
        self.compute = backend.compute_of(compute)
        self._backend, self._program, self._weights, self._choice = backend, program, weights, compute
        size = (limits.n_blocks, limits.block_size, limits.kv_cache)
        self._caches = [reference.empty_cache(c, *size) for c in program.caches]
        self._states = [np.zeros((limits.states, *s.shape), np.float32) for s in program.states]
        self._next_id = 1 + max(v.id for v in [*(v for n in program.nodes for v in n.outputs), *program.inputs.values()])
        self._declined: dict[tuple[str, Any], str] = {}
        self._lines: dict[tuple[str, str], ExplainLine] = {}
        self._last: Array | None = None
        self._last_reads = _last_reads(program)
        self.errors: dict[tuple[str, str], float] = {}
        """The largest error that was found in each place, by path and op."""

    def launch(self, inputs: StepInputs, want: Want) -> Done:
        return Done(self(inputs, want))

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        """Runs and compares; raises QuarrelError (path, op, spec, error, tolerance)."""
        inputs = with_ids(inputs, self._last)
        if "tokens" in outputs_of(want) and inputs.sample is None:
            raise RequestError("a step that draws tokens needs sampling inputs, got none")
        inputs.check(self.limits, vocabulary(self._program))
        values: dict[int, Array] = reference.bind_inputs(self._program, inputs)
        for node, read in zip(self._program.nodes, self._last_reads):
            if all(not isinstance(i, Value) or i.id in values for i in node.inputs):
                self._run(node, values)
            for id in read:
                values.pop(id, None)
        out = {name: values[v.id] for name, v in self._program.outputs.items() if v.id in values}
        if "tokens" in outputs_of(want):
            self._last = out["tokens"]
        return StepOutputs(**{name: out[name] for name in results_of(want, out)})

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for state in self._states:
                state[destination] = state[source]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for cache in self._caches:
                cache.k[destination], cache.v[destination] = cache.k[source], cache.v[source]

    def explain(self) -> list[ExplainLine]:
        """What has run so far: the choice is the backend's own, made op by op. Before the first step, what will run."""
        if self._lines:
            return list(self._lines.values())
        return [
            ExplainLine(n.path, n.op.name, str(n.spec), "run_op, or the ops that it expands to")
            for n in self._program.nodes
        ]

    def memory(self) -> MemoryPlan:
        arrays = [a for c in self._caches for a in (c.k, c.v)] + self._states
        return MemoryPlan(0, 0, sum(a.nbytes for a in arrays), 0)

    def close(self) -> None:
        self._caches, self._states = [], []

    def _run(self, node: Node, values: dict[int, Array]) -> None:
        inputs = [self._fetch(i, values) for i in node.inputs]
        try:
            if (node.op.name, node.spec) in self._declined:
                raise UnsupportedOp(self._backend.name, node.op.name, node.spec, [])
            got = self._backend.run_op(node.op, node.spec, inputs, self._choice)
        except UnsupportedOp as refusal:
            if node.op.expand is None:
                raise
            self._declined.setdefault((node.op.name, node.spec), str(refusal))
            body, self._next_id = expand(node, self._next_id)
            for part in body:
                self._run(part, values)
            return
        self.verify(node, inputs, got)
        self._lines[node.path, node.op.name] = ExplainLine(node.path, node.op.name, str(node.spec), "run_op, checked")
        results = self.passed_on(node, inputs, got)
        if node.op.consumes:
            refs = [i for i in node.inputs if isinstance(i, CacheRef | StateRef)]
            for ref, after in zip(refs, results[-len(refs) :], strict=True):
                self._keep(ref, after)
            del results[-len(refs) :]
        for value, result in zip(node.outputs, results, strict=True):
            assert isinstance(result, np.ndarray)
            values[value.id] = result

    def verify(self, node: Node, inputs: Sequence[Concrete], got: Sequence[Concrete]) -> None:
        """Compares what a node made of its inputs with the reference. Reads only what it is given."""
        with np.errstate(all="ignore"):
            wanted = reference.run_op(node.op, node.spec, inputs)
        self._compare(node, inputs, got, wanted)

    def passed_on(self, node: Node, inputs: Sequence[Concrete], got: Sequence[Concrete]) -> list[Concrete]:
        """What the nodes after this one read."""
        return list(got)

    def _fetch(self, operand: Operand, values: dict[int, Array]) -> Concrete:
        if isinstance(operand, WeightRef):
            return self._weights.raw(operand)
        if isinstance(operand, ConstRef):
            return np.array(operand.data, np.float32)
        if isinstance(operand, StateRef):
            return self._states[operand.index]
        return self._caches[operand.layer] if isinstance(operand, CacheRef) else values[operand.id]

    def _keep(self, ref: CacheRef | StateRef, after: Concrete) -> None:
        if isinstance(ref, CacheRef):
            assert isinstance(after, KVArrays)
            self._caches[ref.layer] = after
        else:
            assert isinstance(after, np.ndarray)
            self._states[ref.index] = after

    def _compare(self, node: Node, inputs: Sequence[Concrete], got: Sequence[Concrete], wanted: Sequence[Concrete]) -> None:
        allowed = node.op.tolerance[self.compute]
        got = [forgive_one_step(g, w) for g, w in zip(got, wanted, strict=True)]
        pairs = list(zip(arrays_of(got), arrays_of(wanted), strict=True))
        errors = [_error(node, inputs, g, w) for g, w in pairs]
        place = node.path, node.op.name
        self.errors[place] = max([self.errors.get(place, 0.0), *errors])
        if max(errors, default=0.0) <= allowed:
            return
        for i, error in enumerate(errors):
            if error <= allowed:
                continue
            conditioned = roundings(node.op, node.spec, inputs, wanted, self.compute)[i]
            if not error <= conditioned:
                raise QuarrelError(
                    f"{node.path or 'the step'}: {node.op.name} on {self._backend.name} is {error:.3g} away from its"
                    f" reference, allowed {max(allowed, conditioned):.3g} in {self.compute}, for {node.spec}; please report"
                    " this"
                )


def _last_reads(program: Program) -> list[list[int]]:
    """For each node the values that no later one reads, and that are no outputs."""
    later, reads = {v.id for v in program.outputs.values()}, []
    for node in reversed(program.nodes):
        own = {v.id for v in (*node.inputs, *node.outputs) if isinstance(v, Value)} - later
        reads.append(sorted(own))
        later |= own
    return reads[::-1]


def _error(node: Node, inputs: Sequence[Concrete], got: Array, wanted: Array) -> float:
    """RMS error relative to the wanted values; of integers and draws 0 or infinity."""
    if node.op is SAMPLE:
        return 0.0 if _draws_alike(node, inputs, got, wanted) else float("inf")
    if got.dtype.kind in "iu":
        return 0.0 if np.array_equal(got, wanted) else float("inf")
    return rel_error(got, wanted)


def _draws_alike(node: Node, inputs: Sequence[Concrete], got: Array, wanted: Array) -> bool:
    """Whether each token is the reference's, or would be with a number a rounding away."""
    logits, temperature, top_k, top_p, min_p, uniform = (np.asarray(i) for i in inputs)
    assert node.op.reference is not None
    alike = got == wanted
    for row in np.flatnonzero(~alike):
        one: list[Array] = [a[row : row + 1] for a in (logits, temperature, top_k)]
        for shift in (-DRAW_SLACK, 0.0, DRAW_SLACK):
            for cut in (-DRAW_SLACK, 0.0, DRAW_SLACK):
                rest = (top_p[row : row + 1] + cut, min_p[row : row + 1] * (1 + cut), uniform[row : row + 1] + shift)
                drawn = np.asarray(node.op.reference(node.spec, *one, *rest)[0])
                alike[row] |= drawn[0] == got[row]
    return bool(alike.all())
