"""The step of all members: every call goes to the others first, then to this process's own share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quarrel.errors import EngineFault, RequestError
from quarrel.ops.contract import Array, Compute
from quarrel.ops.step import (
    CountsExperts,
    Limits,
    MemoryPlan,
    Pending,
    Step,
    StepInputs,
    StepOutputs,
    Taken,
    Want,
    outputs_of,
)
from quarrel.parallel import wire

if TYPE_CHECKING:
    from quarrel.parallel.team import Team

SOON = 1.0
"""Seconds after a device's own fault in which the loss of another process, its likely cause, is known."""


@dataclass(frozen=True)
class _Shared:
    """A step on its way on every device; a fault of any of them is raised here."""

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
        # What this share would refuse must not reach the others, who would wait for it.
        inputs.check(self.limits, self._n_vocab)
        if "tokens" in outputs_of(want) and inputs.sample is None:
            raise RequestError("tokens are asked for without sampling controls: fill StepInputs.sample")
        self._tell(wire.step(inputs, want))
        try:
            return _Shared(self._own.launch(inputs, want), self._team)
        except Exception as error:
            # The others run a step that this one does not: none of them can be relied on.
            fault = self._team.fault(SOON)
            self._team.stop()
            raise (fault or EngineFault(f"the devices are out of step: {type(error).__name__}: {error}")) from error

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._tell(wire.words(do="copy_blocks", pairs=[[int(a), int(b)] for a, b in pairs]))
        self._own.copy_blocks(pairs)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._tell(wire.words(do="copy_states", pairs=[[int(a), int(b)] for a, b in pairs]))
        self._own.copy_states(pairs)

    def expert_counts(self) -> dict[str, Array]:
        """See `ops.step.CountsExperts`; every member routes all tokens."""
        return self._own.expert_counts() if isinstance(self._own, CountsExperts) else {}

    def explain(self) -> list[Taken]:
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

    def _tell(self, message: bytes) -> None:
        fault = self._team.fault()
        if fault is not None:
            raise fault
        self._team.tell(message)
