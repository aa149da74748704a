"""The step of a pipeline: the other processes have the stages before, this one the last, where tokens are drawn.

A step goes through the stages in micro-batches, so that each stage has work while the next computes what it gave.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quarrel.errors import RequestError
from quarrel.ops.contract import Array
from quarrel.ops.step import Done, Pending, Step, StepInputs, Want, outputs_of, with_ids
from quarrel.parallel.messages import pack_step
from quarrel.parallel.pieces import joined, pieces
from quarrel.parallel.step import SOON, ParallelStep
from quarrel.parallel.team import Team

EACH = 4
"""Micro-batches of a long step for each stage: with S stages, (S - 1) / (4 S + S - 1) of the time is waited."""


class StagedStep(ParallelStep):
    """See `ops.step.Step`. A launch is over when it returns."""

    def __init__(self, own: Step, team: Team, n_vocab: int, width: int) -> None:
        super().__init__(own, team, n_vocab)
        self._width = width  # of the stream
        # The others of the last stage, and the members of the stages before.
        each = team.work.ranks // team.work.stages
        self._beside, self._before = team.members[: each - 1], team.members[each - 1 :]
        self._drawn: Array | None = None

    def launch(self, inputs: StepInputs, want: Want) -> Pending:
        inputs = with_ids(inputs, self._drawn)
        inputs.check(self.limits, self._n_vocab)
        if "tokens" in outputs_of(want) and inputs.sample is None:
            raise RequestError("tokens are wanted without sampling controls: fill StepInputs.sample")
        stages = self._team.work.stages
        parts = pieces(inputs, want, EACH * stages)
        for part in parts:
            self._send(pack_step(replace(part.inputs, sample=None), "hidden"), self._before)
            self._send(pack_step(part.inputs, part.want), self._beside)
        chain: Any = self._team.groups.chain
        found = []
        try:
            for part in parts:
                stream = chain.receive(stages - 1, (len(part.inputs.ids), self._width))
                found.append(self._own(replace(part.inputs, stream=stream), part.want))
        except Exception as error:
            fault = self._team.fault(SOON)
            self._team.stop()
            raise (fault or error) from error
        if (lost := self._team.fault()) is not None:  # what a GPU waited for may not have come
            raise lost
        outputs = joined(parts, found)
        if outputs.tokens is not None:
            self._drawn = outputs.tokens
        return Done(outputs)
