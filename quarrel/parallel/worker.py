"""A member that is not the first: a process of its own, which runs the steps that it receives."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from quarrel.child.heartbeat import Heart
from quarrel.child.phase import Phase, PhaseClock
from quarrel.child.spawn import link_of
from quarrel.child.wire import Link, pack_error
from quarrel.convert import open_file
from quarrel.errors import QuarrelError
from quarrel.models import ModelSpec, Tensors, assemble, read_spec
from quarrel.models.shard import shard
from quarrel.ops.program import Program
from quarrel.ops.registry import backend as backend_named
from quarrel.ops.step import KeepsStream, Limits, Pending, Step, StepInputs, Want
from quarrel.ops.windows import with_window_groups
from quarrel.parallel.groups import device_of, join
from quarrel.parallel.meeting import Meeting
from quarrel.parallel.messages import Message, pack, unpack


class Worker:
    """One member: loads its share, then runs steps."""

    def __init__(self, link: Link) -> None:
        self._link, self._parent = link, os.getppid()
        self._clock = PhaseClock("loading")
        self._pending: Pending | None = None
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        Heart(self._clock, self._beat)
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self) -> None:
        """Until the first process is gone."""
        self._clock.follow_compiler()
        work = self._next()
        rank, ranks, stages = work["rank"], work["ranks"], work["stages"]
        _check_files(work["paths"], work["sizes"])
        device = device_of(work["backend"], work["device"])
        backend = backend_named(work["backend"], work["threads"])
        reason = backend.unavailable()
        if reason is not None:
            raise QuarrelError(f"backend {backend.name} cannot run: {reason}")
        self._link.send(pack(do="free", bytes=backend.free_bytes()))
        load = self._next()
        # From here on its tensors are on this device, and its sums are those of its stage.
        groups = join(Meeting(**work["meeting"]), rank, ranks, stages, backend, device, work["peer_sums"])
        with open_file([Path(p) for p in work["paths"]]) as file:
            whole = read_spec(file, load["n_ctx"])
            assert isinstance(whole, ModelSpec)
            spec, tensors = shard(whole, Tensors(file), rank, ranks, work["split"], stages)
            limits = Limits(**load["limits"])
            program = with_window_groups(assemble(spec, tensors), limits.window_groups)
            with self._clock.compiling():
                step = backend.compile(program, tensors, limits, work["compute"])
            self._link.send(pack(do="ready"))
            while True:
                if groups.chain is not None and self._messages.empty():
                    groups.chain.wait_sent()  # while this process still counts as stepping
                self._clock.enter("idle")
                message = unpack(self._messages.get())
                self._clock.enter("stepping")
                if groups.chain is not None and isinstance(message, tuple):
                    _pass_on(step, *message, groups.chain, program)
                else:
                    self._handle(step, message)

    def _handle(self, step: Step, message: Any) -> None:
        if isinstance(message, tuple):
            # Every member has the same results, and the first one's are used. Waiting for the step before keeps as many in
            # flight as there are in the first process.
            before, self._pending = self._pending, step.launch(*message)
            if before is not None:
                before.result()
        elif message["do"] == "copy_blocks":
            step.copy_blocks([(a, b) for a, b in message["pairs"]])
        elif message["do"] == "copy_states":
            step.copy_states([(a, b) for a, b in message["pairs"]])

    def _next(self) -> Message:
        message = unpack(self._messages.get())
        assert not isinstance(message, tuple)
        return message

    def _beat(self, phase: Phase, seconds: float) -> None:
        if os.getppid() != self._parent:
            os._exit(0)  # what started this process on its host is gone, and the host may be
        with contextlib.suppress(OSError):  # the first process is gone, which `_listen` notices
            self._link.send(pack(do="beat", phase=phase, seconds=seconds))

    def _listen(self) -> None:
        while (message := self._link.receive()) is not None:
            self._messages.put(message)
        os._exit(0)  # nobody would read what this process waits for


def _pass_on(step: Step, inputs: StepInputs, want: Want, chain: Any, program: Program) -> None:
    """Runs a micro-batch on the stream of the stage before, and gives the next stage what comes of it. The results of the
    last stage are those of its first member, which all of its members have."""
    if (stream := program.inputs.get("stream")) is not None:
        before = (chain.rank - 1) % chain.size
        inputs = replace(inputs, stream=chain.receive(before, (len(inputs.ids), int(stream.dims[1]))))
    if not chain.rank:
        step(inputs, want)
        return
    made: Any
    if chain.on_device:
        assert isinstance(step, KeepsStream)
        made = step.keep_stream(inputs, want)
    else:
        made = step(inputs, want).stream
    chain.send(made, (chain.rank + 1) % chain.size)


def _check_files(paths: list[str], sizes: list[int | None]) -> None:
    """Raises QuarrelError where another host lacks the model, or has another one of its name."""
    for path, size in zip(paths, sizes, strict=True):
        found = Path(path).stat().st_size if Path(path).is_file() else None
        if found != size:
            has = "no such file" if found is None else f"{found} bytes"
            raise QuarrelError(
                f"{path}: {has}, wanted the {size} bytes of the first host's: every host has the model's file"
            )


def main(descriptor: int) -> None:
    link = link_of(descriptor)
    try:
        Worker(link).run()
    except BaseException as error:
        with contextlib.suppress(OSError):
            link.send(pack(do="fault", error=pack_error(error)))
        os._exit(1)
