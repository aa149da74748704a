"""The step of all members: every call goes to the others first, then to this process's own shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from quarrel.errors import BackendUnavailable, EngineFault, RequestError
from quarrel.gguf import GGUFFile
from quarrel.models import ModelSpec, Tensors, assemble
from quarrel.models.shard import shard
from quarrel.ops.collective import Joins
from quarrel.ops.contract import Array, Compute
from quarrel.ops.step import (
    Backend,
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
    outputs_of,
)
from quarrel.ops.windows import with_window_groups
from quarrel.parallel.groups import device_of, join
from quarrel.parallel.messages import pack, pack_step
from quarrel.parallel.team import Member, Team

SOON = 1.0
"""Seconds after a device's own fault in which the loss of another process, its likely cause, is known."""


def compile_shared(
    team: Team,
    backend: Backend,
    whole: ModelSpec,
    file: GGUFFile,
    limits: Limits,
    n_ctx: int,
    progress: Callable[[int, int], None] | None = None,
) -> Step:
    """The step of all members, on the thread that will run it. Closes the team if one of them fails."""
    if not isinstance(backend, Joins):
        message = f"the {backend.name} backend runs on one device: leave tensor_parallel out"
        raise BackendUnavailable(message, "tensor_parallel")
    work = team.work
    try:
        team.free_bytes()
        team.send(pack(do="load", n_ctx=n_ctx, limits=asdict(limits)))
        device = device_of(backend.name, 0)
        team.groups = join(team.meeting, 0, work.ranks, work.stages, backend, device, work.peer_sums)
        spec, tensors = shard(whole, Tensors(file), 0, work.ranks, work.split, work.stages)
        program = with_window_groups(assemble(spec, tensors), limits.window_groups)
        step = backend.compile(program, tensors, limits, work.compute, progress)
        for member in team.members:
            member.wait("ready")
    except BaseException:
        fault = team.fault()
        team.close()
        if fault is not None:
            raise fault from None
        raise
    if work.stages > 1:
        from quarrel.parallel.staged import StagedStep

        return StagedStep(step, team, whole.n_vocab, int(program.inputs["stream"].dims[1]))
    return ParallelStep(step, team, whole.n_vocab)


@dataclass(frozen=True)
class _Shared:
    """A step that runs on every device; a fault of any of them is raised here."""

    own: Pending
    team: Team

    def result(self) -> StepOutputs:
        try:
            outputs = self.own.result()
        except Exception as error:
            raise (self.team.fault(SOON) or error) from None
        fault = self.team.fault()
        if fault is not None:
            raise fault
        return outputs


class ParallelStep:
    """See `ops.step.Step`; what it returns is the first member's, which is everyone's."""

    def __init__(self, own: Step, team: Team, n_vocab: int) -> None:
        self.limits: Limits = own.limits
        self.compute: Compute = own.compute
        self._own, self._team, self._n_vocab = own, team, n_vocab

    def __call__(self, inputs: StepInputs, want: Want) -> StepOutputs:
        return self.launch(inputs, want).result()

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        # What this process would refuse must not reach the others, who would wait for it.
        inputs.check(self.limits, self._n_vocab)
        if "tokens" in outputs_of(want) and inputs.sample is None:
            raise RequestError("tokens are wanted without sampling controls: fill StepInputs.sample")
        self._send(pack_step(inputs, want))
        try:
            return _Shared(self._own.launch(inputs, want), self._team)
        except Exception as error:
            # The others run a step that this one does not: none of them can be relied on.
            fault = self._team.fault(SOON)
            self._team.stop()
            raise (fault or EngineFault(f"the devices are out of step: {type(error).__name__}: {error}")) from error

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._send(pack(do="copy_blocks", pairs=[[int(a), int(b)] for a, b in pairs]))
        self._own.copy_blocks(pairs)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._send(pack(do="copy_states", pairs=[[int(a), int(b)] for a, b in pairs]))
        self._own.copy_states(pairs)

    def expert_counts(self) -> dict[str, Array]:
        """See `ops.step.CountsExperts`; every member routes all tokens."""
        return self._own.expert_counts() if isinstance(self._own, CountsExperts) else {}

    def finite_states(self, slot: int) -> bool:
        """See `ops.step.KeepsStates`; of the first member's part, which a NaN anywhere reaches in the next layer."""
        return not isinstance(self._own, KeepsStates) or self._own.finite_states(slot)

    def explain(self) -> list[ExplainLine]:
        return self._own.explain()

    def memory(self) -> MemoryPlan:
        """Of the first device."""
        return self._own.memory()

    def close(self) -> None:
        try:
            # Graphs go before the communicators that they were captured with.
            self._own.close()
        finally:
            self._team.close()

    def _send(self, message: bytes, members: Sequence[Member] | None = None) -> None:
        """To all, or to these."""
        fault = self._team.fault()
        if fault is not None:
            raise fault
        self._team.send(message, members)
