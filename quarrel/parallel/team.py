"""The processes of one model: started together, told every step, and all ended when one of them is."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import quarrel.errors
from quarrel.errors import BackendUnavailable, EngineFault, OutOfMemory, QuarrelError, UnsupportedModel
from quarrel.gguf import GGUFFile
from quarrel.models import ModelSpec, Tensors, assemble
from quarrel.models.shard import Split, shard
from quarrel.ops.collective import Joins
from quarrel.ops.step import Backend, ComputeChoice, Limits, Step
from quarrel.ops.windows import as_planned
from quarrel.parallel import wire
from quarrel.parallel.step import ParallelStep

log = logging.getLogger("quarrel")

PATIENCE = 600.0
"""Seconds for another process to load its share."""
_END = 5.0
_PLAIN = (BackendUnavailable, OutOfMemory, QuarrelError, UnsupportedModel)
"""Errors of another process that are raised here as they are."""


@dataclass(frozen=True)
class Work:
    """What every member is to know."""

    paths: tuple[Path, ...]
    backend: str
    compute: ComputeChoice
    ranks: int
    split: Split = "auto"
    threads: int | None = None
    """Of each process, on a CPU."""
    one_shot: bool = True
    """Small sums of GPUs in one launch, where they reach each other's memory over NVLink (`group.py`)."""


class Member:
    """Another process, as the first one sees it."""

    def __init__(self, rank: int, told: Callable[[Member], None]) -> None:
        self.rank, self._told = rank, told
        self.lost: str | None = None
        self._failed: wire.Words | None = None
        self._said: queue.SimpleQueue[wire.Words | None] = queue.SimpleQueue()
        self.link, other = socket.socketpair()
        root = str(Path(quarrel.errors.__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quarrel.parallel.worker", str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )
        threading.Thread(target=self._listen, name=f"quarrel-rank-{rank}", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Raises EngineFault when it is gone."""
        try:
            wire.send(self.link, message)
        except OSError:
            raise self.fault() from None

    def wait(self, do: str) -> wire.Words:
        """Its next answer. Raises what it failed with."""
        try:
            said = self._said.get(timeout=PATIENCE)
        except queue.Empty:
            raise EngineFault(f"the process of device {self.rank} gave no answer in {PATIENCE:g} seconds") from None
        if said is None:
            raise self.fault()
        assert said["do"] == do, said
        return said

    def fault(self) -> QuarrelError:
        """What it failed with, or that it is gone."""
        if self._failed is not None:
            kind = getattr(quarrel.errors, self._failed["kind"], None)
            if isinstance(kind, type) and kind in _PLAIN:
                return kind(f"device {self.rank}: {self._failed['said']}")
        why = self.lost or "it does not answer"
        return EngineFault(f"the process of device {self.rank} is lost ({why}): its share of the model is gone with it")

    def close(self) -> None:
        """Ends the process; it ends by itself when its link is closed."""
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_RDWR)
        self.link.close()
        try:
            self.process.wait(_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _listen(self) -> None:
        while (message := wire.receive(self.link)) is not None:
            said = wire.parse(message)
            assert not isinstance(said, tuple)
            if said["do"] == "fault":
                self._failed = said
                self.lost = f"{said['kind']}: {said['said']}"
                break
            self._said.put(said)
        if self.lost is None:
            self.lost = "it ended"
        self._said.put(None)
        self._told(self)


class Team:
    """The members of one model, this process first. Close it, or what it compiled."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.folder = Path(tempfile.mkdtemp(prefix="quarrel-"))
        self.group: Any = None
        self._closed = False
        self._free: int | None = None
        self._lost = threading.Event()
        self._lock = threading.Lock()
        self.members: list[Member] = []
        try:
            self.members += [Member(rank, self._lose) for rank in range(1, work.ranks)]
            for member in self.members:
                member.send(
                    wire.words(
                        do="start",
                        paths=[str(p) for p in work.paths],
                        backend=work.backend,
                        compute=work.compute,
                        rank=member.rank,
                        ranks=work.ranks,
                        split=work.split,
                        threads=work.threads,
                        folder=str(self.folder),
                        one_shot=work.one_shot,
                    )
                )
        except BaseException:
            self.close()
            raise

    def free_bytes(self) -> int:
        """The least that any other member has."""
        if self._free is None:
            self._free = min(int(member.wait("free")["bytes"]) for member in self.members)
        return self._free

    def compile(
        self,
        backend: Backend,
        whole: ModelSpec,
        file: GGUFFile,
        limits: Limits,
        n_ctx: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> Step:
        """The step of all members, on the thread that will run it."""
        from quarrel.parallel.group import TorchGroup
        from quarrel.parallel.worker import device_of

        if not isinstance(backend, Joins):
            raise BackendUnavailable(f"the {backend.name} backend runs on one device: leave tensor_parallel out")
        try:
            self.free_bytes()
            self.tell(wire.words(do="load", n_ctx=n_ctx, limits=asdict(limits)))
            self.group = TorchGroup(self.folder, 0, self.work.ranks, device_of(backend.name, 0), self.work.one_shot)
            backend.join(self.group)
            spec, tensors = shard(whole, Tensors(file), 0, self.work.ranks, self.work.split)
            program = as_planned(assemble(spec, tensors), limits.window_groups)
            step = backend.compile(program, tensors, limits, self.work.compute, progress)
            for member in self.members:
                member.wait("ready")
        except BaseException:
            fault = self.fault()
            self.close()
            if fault is not None:
                raise fault from None
            raise
        return ParallelStep(step, self, whole.n_vocab)

    def tell(self, message: bytes) -> None:
        """Sends every member the same. Raises EngineFault."""
        for member in self.members:
            member.send(message)

    def fault(self, patience: float = 0.0) -> QuarrelError | None:
        """Why the team cannot go on, if it cannot; waits so many seconds for a reason."""
        if patience:
            self._lost.wait(patience)
        found = next((m for m in self.members if m.lost is not None), None)
        return None if found is None else found.fault()

    def stop(self) -> None:
        """Ends every process; what waits for them here comes to an end too."""
        for member in self.members:
            member.close()

    def close(self) -> None:
        """Ends every process and gives everything back. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.stop()
        if self.group is not None:
            self.group.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _lose(self, member: Member) -> None:
        """A member is gone: whatever this process waits for on the device must come to an end."""
        with self._lock:
            closed = self._closed
        if not closed:
            log.error("the process of device %d is lost: %s", member.rank, member.lost)
        self._lost.set()
        if not closed and self.group is not None:
            self.group.abort()
