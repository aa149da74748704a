"""A step whose first layers the host computes and the rest a device: two stages in one process.

The host computes a micro-batch while the device computes the one before it; of a step of few rows, where every micro-batch
would read all weights again, there is one. The stream crosses once, at the border, and the tokens come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from quarrel.errors import RequestError
from quarrel.ops.contract import Array, Compute
from quarrel.ops.embedding import vocabulary
from quarrel.ops.program import Program
from quarrel.ops.step import (
    Backend,
    ComputeChoice,
    CountsExperts,
    ExplainLine,
    KeepsStates,
    Limits,
    MemoryPlan,
    Pending,
    Step,
    StepInputs,
    StepOutputs,
    Want,
    WeightSource,
    outputs_of,
    with_ids,
)
from quarrel.ops.transfer import CacheForm, Transfers
from quarrel.parallel.pieces import Piece, joined, pieces

PIECES = 4
"""Micro-batches of a long step: the device's part of the last one is what the host's does not hide."""
LONGEST = 512
"""Rows of one of them, of a longer step: the host reads its weights as seldom as is useful."""


class HostLayersStep:
    """See `ops.step.Step`: `first` is the host's, with the program of the first stage, `rest` the device's."""

    pieces = PIECES

    def __init__(self, first: Step, rest: Step, n_vocab: int) -> None:
        self.limits: Limits = rest.limits
        self.compute: Compute = rest.compute
        self.first, self._rest, self._n_vocab = first, rest, n_vocab
        self._drew: _Launched | None = None  # the last launch of tokens

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        return self.launch(inputs, want).result()

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        """The host's part is over when this returns; the device's is on its way."""
        last = None if inputs.from_last is None or self._drew is None else self._drew.result().tokens
        inputs = with_ids(inputs, last)
        inputs.check(self.limits, self._n_vocab)
        drawn = "tokens" in outputs_of(want)
        if drawn and inputs.sample is None:
            raise RequestError("tokens are wanted without sampling controls: fill StepInputs.sample")
        parts = pieces(inputs, want, max(self.pieces, -(-len(inputs.ids) // LONGEST)))
        launched = _Launched(parts, [self._start(part) for part in parts])
        if drawn:
            self._drew = launched
        return launched

    def _start(self, part: Piece) -> Pending:
        given = self.first(replace(part.inputs, sample=None), "hidden")
        return self._rest.launch(replace(part.inputs, stream=given.stream, per_layer=given.per_layer), part.want)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for step in (self.first, self._rest):
            step.copy_blocks(pairs)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for step in (self.first, self._rest):
            step.copy_states(pairs)

    def finite_states(self, slot: int) -> bool:
        """See `ops.step.KeepsStates`."""
        return all(not isinstance(step, KeepsStates) or step.finite_states(slot) for step in (self.first, self._rest))

    def expert_counts(self) -> dict[str, Array]:
        """See `ops.step.CountsExperts`."""
        counted = [step.expert_counts() for step in (self.first, self._rest) if isinstance(step, CountsExperts)]
        return {path: counts for found in counted for path, counts in found.items()}

    def form(self) -> CacheForm:
        """See `ops.transfer.Transfers`: the host's layers, then the device's."""
        first, rest = (step.form() for step in self._both)
        kinds = dict.fromkeys(form.kind for form in (first, rest) if form.layers)
        return replace(
            rest,
            kind=" and ".join(kinds) or rest.kind,
            layers=first.layers + rest.layers,
            states=first.states + rest.states,
        )

    def read_blocks(self, blocks: Sequence[int], into: Sequence[Array] = ()) -> list[Array]:
        first, rest = self._both
        own = 2 * len(first.form().layers)
        return [*first.read_blocks(blocks, into[:own]), *rest.read_blocks(blocks, into[own:])]

    def write_blocks(self, blocks: Sequence[int], arrays: Sequence[Array], layer: int = 0) -> None:
        first, rest = self._both
        layers = len(first.form().layers)
        own = 2 * max(0, layers - layer)
        first.write_blocks(blocks, arrays[:own], layer)
        rest.write_blocks(blocks, arrays[own:], max(0, layer - layers))

    def transferred(self) -> Callable[[], None]:
        return self._both[1].transferred()  # the host's are there at once

    def pin(self, memory: Array) -> Callable[[], None]:
        return self._both[1].pin(memory)

    def read_states(self, slots: Sequence[int]) -> list[Array]:
        return [array for step in self._both for array in step.read_states(slots)]

    def write_states(self, slots: Sequence[int], arrays: Sequence[Array]) -> None:
        first, rest = self._both
        own = len(first.form().states)
        first.write_states(slots, arrays[:own])
        rest.write_states(slots, arrays[own:])

    @property
    def _both(self) -> tuple[Transfers, Transfers]:
        assert isinstance(self.first, Transfers)
        assert isinstance(self._rest, Transfers)
        return self.first, self._rest

    def explain(self) -> list[ExplainLine]:
        """Lines of the host's layers say so."""
        lines = [replace(t, implementation=f"on the host: {t.implementation}") for t in self.first.explain()]
        return [*lines, *self._rest.explain()]

    def memory(self) -> MemoryPlan:
        """Of the device; `first.memory()` is the host's."""
        return self._rest.memory()

    def close(self) -> None:
        self._rest.close()
        self.first.close()


class _Launched:
    """See `ops.step.Pending`: the micro-batches of a step."""

    def __init__(self, parts: Sequence[Piece], pending: Sequence[Pending]) -> None:
        self._parts, self._pending = parts, pending
        self._outputs: StepOutputs | None = None

    def result(self) -> StepOutputs:
        if self._outputs is None:
            self._outputs = joined(self._parts, [each.result() for each in self._pending])
        return self._outputs


def compile_stages(
    stages: tuple[Program, Program],
    host: Backend,
    backend: Backend,
    weights: WeightSource,
    limits: Limits,
    compute: ComputeChoice = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> HostLayersStep:
    """The step of a program in `models.stages.two_stages`: the first stage on the host's backend."""
    first, rest = stages
    first_step = host.compile(first, weights, limits, "float32" if compute == "float32" else "auto")
    try:
        step = backend.compile(rest, weights, limits, compute, progress)
    except BaseException:
        first_step.close()
        raise
    return HostLayersStep(first_step, step, vocabulary(first))
