"""The one thread that owns a step. Callers send it jobs; it runs them between steps, and steps while there is work.

All that touches a backend happens here, compiling and closing included: devices keep per-thread state, and an interrupt
(Ctrl-C), which Python raises in the main thread only, can never tear a step apart.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from quarrel.child.phase import PhaseClock
from quarrel.engine.cache import DEFAULT_RULES, CacheRules
from quarrel.engine.draft import MakeDrafter
from quarrel.engine.engine import Engine
from quarrel.engine.images import EncodesImages, SightRules
from quarrel.engine.output import OutputBuffer
from quarrel.engine.queue import MAX_WAITING, Places
from quarrel.engine.sequence import Sequence
from quarrel.errors import EngineFault, QuarrelError
from quarrel.ops.step import Step

log = logging.getLogger(__name__)
T = TypeVar("T")

CLOSED = "the model is closed: load it again"
FORKED = "the model was loaded by the process that this one was forked from: load it here"


class Loop:
    """Runs an engine. Safe for threads."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.outputs = OutputBuffer()
        """What sinks put here, on the thread, is sent behind each step."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._fault: str | None = None
        self.places = Places(0)
        self._process = os.getpid()
        self.phase = PhaseClock()
        """What the thread does; each job, and each step, is a phase of its own."""
        self._thread = threading.Thread(target=self._main, name="quarrel-engine", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> str | None:
        """Why the engine has ended for good, unless it was closed."""
        return self._fault

    def run(self, job: Callable[[], T]) -> T:
        """Runs `job` on the thread and waits for what it returns or raises."""
        future: Future[T] = Future()

        def fulfil() -> None:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        self._post(fulfil)
        return future.result()

    def serve(
        self,
        make_step: Callable[[], Step],
        width: int,
        rules: CacheRules = DEFAULT_RULES,
        *,
        max_waiting: int = MAX_WAITING,
        make_drafter: MakeDrafter | None = None,
        profile_steps: int = 0,
        beside: int | None = None,
        sight: SightRules | None = None,
        make_encoder: Callable[[], EncodesImages] | None = None,
    ) -> Step:
        """Makes the step on the thread, and runs an engine on it from now on; the rest as in `Engine`.
        max_waiting: sequences that may be there beyond those that can run at once."""

        make_step, make_drafter = self._compiling(make_step), make_drafter and self._compiling(make_drafter)
        make_encoder = make_encoder and self._compiling(make_encoder)

        def job() -> Step:
            self.engine = Engine(
                make_step,
                width,
                rules,
                ended=self._ended,
                make_drafter=make_drafter,
                profile_steps=profile_steps,
                beside=beside,
                sight=sight,
                make_encoder=make_encoder,
            )
            self.places.size = self.engine.step.limits.max_seqs + max_waiting
            return self.engine.step

        return self.run(job)

    def add(self, *sequences: Sequence) -> None:
        """Queues sequences; what becomes of them goes to their sinks. Raises `QueueFull` for all or none of them."""
        posted = time.perf_counter()

        def job() -> None:
            assert self.engine is not None
            for sequence in sequences:
                self.engine.add(sequence, waited=time.perf_counter() - posted)

        self._post(job, places=len(sequences))

    def cancel(self, *sequences: Sequence) -> None:
        """Ends sequences as cancelled, as soon as the running step is done. Nothing happens to those that are over."""

        def job() -> None:
            assert self.engine is not None
            for sequence in sequences:
                self.engine.cancel(sequence)

        try:
            self._post(job)
        except QuarrelError:
            return  # closed: they have ended

    def close(self, timeout: float | None = None) -> None:
        """Cancels what runs, gives the step's memory back and ends the thread. May be called twice."""
        if self._forked():
            return  # the thread, and perhaps a holder of the lock, are in the other process only
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _compiling(self, make: Callable[[], T]) -> Callable[[], T]:
        def made() -> T:
            with self.phase.compiling():
                return make()

        return made

    def _ended(self, sequence: Sequence) -> None:
        with self._wake:
            self.places.free()

    def _forked(self) -> bool:
        return os.getpid() != self._process

    def _post(self, job: Callable[[], None], places: int = 0) -> None:
        if self._forked():
            raise QuarrelError(FORKED)
        with self._wake:
            if self._closing or self._fault is not None:
                raise QuarrelError(self._fault or CLOSED)
            if places:
                assert self.engine is not None
                self.places.take(places, self.engine.stats)
            self._jobs.append(job)
            self._wake.notify()

    def _main(self) -> None:
        self.phase.follow_compiler()
        try:
            busy = False
            while True:
                with self._wake:
                    while not (busy or self._jobs or self._closing):
                        self.phase.enter("idle")
                        self._wake.wait()
                    if self._closing:
                        break
                    jobs, self._jobs = self._jobs, deque()
                while jobs:
                    self.phase.enter("stepping")
                    jobs.popleft()()  # and is forgotten, with all that it has returned
                self.outputs.send()  # ends that jobs brought about do not wait for the step
                self.phase.enter("stepping")
                busy = self.engine is not None and self.engine.advance()
                self.outputs.send()
        except BaseException as error:
            log.exception("the engine thread ended")
            self._fault = (
                f"the engine stopped after an internal error ({type(error).__name__}: {error}): load the model again"
            )
        self._shut()

    def _shut(self) -> None:
        """Nobody is left waiting: jobs that came too late find the engine closed, sequences end."""
        engine = self.engine
        with self._wake:
            jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            job()
        if engine is not None:
            engine.end_all(*(("cancelled",) if self._fault is None else ("error", EngineFault(self._fault))))
            self.outputs.send()
            engine.close()
