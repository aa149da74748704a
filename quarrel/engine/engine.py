"""The engine without its thread: one step at a time, and what it does to the sequences in it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from quarrel.engine.inputs import step_inputs
from quarrel.engine.results import FinishReason
from quarrel.engine.scheduler import Batch, Part, Scheduler
from quarrel.engine.sequence import Sequence
from quarrel.errors import QuarrelError
from quarrel.ops.step import Step, StepOutputs

log = logging.getLogger(__name__)

ROW_BUDGET = 1 << 26
"""What one step returns at most, counted in numbers (256 MiB)."""


@dataclass(frozen=True)
class Activity:
    """How busy it is."""

    running: int
    waiting: int
    free_blocks: int
    n_blocks: int
    kept_prefixes: int


class Engine:
    """Runs sequences on a step. Not safe for threads: `Loop` owns it. width: of the widest row that is asked for."""

    def __init__(self, step: Step, width: int, *, reuse: bool = True) -> None:
        self.step = step
        self.scheduler = Scheduler(step.limits, self._copy, max_rows=ROW_BUDGET // width, reuse=reuse)

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Ends it as cancelled, unless it is over."""
        if not sequence.over:
            self._end(sequence, "cancelled")

    def fail_all(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends whatever waits or runs."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self._end(sequence, reason, error)

    def advance(self) -> bool:
        """Runs one step; False if there was nothing to do."""
        batch = self.scheduler.next()
        if batch is None:
            return False
        now = time.perf_counter()
        for part in batch.parts:
            part.sequence.started = part.sequence.started or now
        try:
            outputs = self.step(step_inputs(batch, self.step.limits), batch.want)
        except Exception as error:
            self._fail(batch, error)
            return True
        row = 0
        for part in batch.parts:
            self._settle(part, outputs, row)
            row += part.rows
        return True

    def activity(self) -> Activity:
        s = self.scheduler
        return Activity(len(s.running), len(s.waiting), s.pool.free, s.pool.n_blocks, len(s.prefixes))

    def _settle(self, part: Part, outputs: StepOutputs, row: int) -> None:
        sequence = part.sequence
        sequence.computed += part.count
        if not part.rows:
            return
        try:
            sequence.settle(outputs, row, part.rows)
        except Exception as error:
            # A caller's sink that raises, or a text that cannot be told: this sequence's affair, nobody else's.
            log.exception("a sequence failed behind its step")
            self._end(sequence, "error", _sentence(error))
        else:
            if sequence.over:
                self._end(sequence, "stop")

    def _fail(self, batch: Batch, error: Exception) -> None:
        level = logging.INFO if isinstance(error, QuarrelError) else logging.ERROR
        log.log(level, "a step of %d sequences failed", len(batch.parts), exc_info=error)
        for part in batch.parts:
            # What a broken step left in the cache is not to be reused.
            part.sequence.keeps_prefix = False
            self._end(part.sequence, "error", _sentence(error))

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        self.scheduler.remove(sequence)
        try:
            sequence.end(reason, error)
        except Exception:
            log.exception("a caller could not be told that its sequence is over")
        sequence.over = True

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        self.step.copy_blocks(pairs)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, QuarrelError) else f"the step failed: {type(error).__name__}: {error}"
