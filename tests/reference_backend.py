"""A backend for tests: the NumPy references on whole programs, in float64. It runs the tiny reference models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quarrel.errors import RequestError
from quarrel.gguf import GGMLType
from quarrel.ops import reference
from quarrel.ops.contract import Compute, Concrete, Op, RawWeight, WeightRef
from quarrel.ops.embedding import vocabulary
from quarrel.ops.program import Program
from quarrel.ops.step import (
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
    with_ids,
)


class Dense:
    """Weights dequantised once, so that a token takes milliseconds."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        self._dense: dict[WeightRef, RawWeight] = {}

    def raw(self, ref: WeightRef) -> RawWeight:
        if ref not in self._dense:
            values = np.ascontiguousarray(self._weights.raw(ref).dense())
            self._dense[ref] = RawWeight(GGMLType.F32, values.view(np.uint8).reshape(ref.rows, -1), ref.k)
        return self._dense[ref]


class ReferenceStep:
    """Runs the program node by node; `calls` counts steps, `tokens` the rows that went through them."""

    compute: Compute = "float32"

    def __init__(self, program: Program, weights: WeightSource, limits: Limits) -> None:
        self.limits, self._program, self._weights = limits, program, Dense(weights)
        # NaN where nothing was written: what a sequence must not read is seen when it does.
        self._caches = [reference.empty_cache(c, limits.n_blocks, limits.block_size, fill=np.nan) for c in program.caches]
        self._states = [np.full((limits.states, *s.shape), np.nan, np.float32) for s in program.states]
        self.calls = self.tokens = 0
        self._last: np.ndarray | None = None  # type: ignore[type-arg]
        self.wants: list[Want] = []
        self.closed = False
        self.fail: Exception | None = None

    def launch(self, inputs: StepInputs, want: Want) -> Done:
        return Done(self(inputs, want))

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        assert not self.closed
        inputs = with_ids(inputs, self._last)
        inputs.check(self.limits, vocabulary(self._program))
        if self.fail is not None:
            raise self.fail
        if "tokens" in outputs_of(want) and inputs.sample is None:
            raise RequestError("no sampling inputs")
        self.calls, self.tokens = self.calls + 1, self.tokens + len(inputs.ids)
        self.wants.append(want)
        outputs = reference.run_program(self._program, self._weights, self._caches, inputs, self._states)
        if "tokens" in outputs_of(want):
            self._last = outputs["tokens"]
        return StepOutputs(**{name: outputs[name] for name in outputs_of(want)})

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for cache in self._caches:
                cache.k[destination], cache.v[destination] = cache.k[source], cache.v[source]

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            for state in self._states:
                state[destination] = state[source]

    def explain(self) -> list[ExplainLine]:
        return [ExplainLine(n.path, n.op.name, str(n.spec), "reference") for n in self._program.nodes]

    def memory(self) -> MemoryPlan:
        return MemoryPlan(0, 0, sum(a.nbytes for c in self._caches for a in (c.k, c.v)), 0)

    def close(self) -> None:
        self.closed = True


class ReferenceBackend:
    """`free` is what it says it has. `step` is the last one compiled."""

    name = "reference"
    step_tokens = 512

    def __init__(self, free: int = 1 << 26) -> None:
        self.free = free
        self.step: ReferenceStep | None = None

    def unavailable(self) -> str | None:
        return None

    def device(self) -> str:
        return "NumPy"

    def free_bytes(self) -> int:
        return self.free

    def compile(
        self,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        compute: ComputeChoice = "auto",
        progress: Callable[[int, int], None] | None = None,
    ) -> ReferenceStep:
        if progress is not None:
            progress(1, 1)
        self.step = ReferenceStep(program, weights, limits)
        return self.step

    def run_op(
        self, op: Op, spec: object, inputs: Sequence[Concrete], compute: ComputeChoice = "auto"
    ) -> tuple[Concrete, ...]:
        return reference.run_op(op, spec, inputs)

    def compute_of(self, choice: ComputeChoice) -> Compute:
        return "float32"
