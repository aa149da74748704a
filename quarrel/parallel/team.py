"""The processes of one model: started together, sent every step, and all ended when one of them is lost."""

from __future__ import annotations

import logging
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quarrel.child.heartbeat import Watch
from quarrel.child.spawn import Child, spawn
from quarrel.child.wire import Json, error_kind, unpack_error
from quarrel.errors import BackendUnavailable, EngineFault, OutOfMemory, QuarrelError, UnsupportedModel
from quarrel.models.shard import Split
from quarrel.ops.step import ComputeChoice
from quarrel.parallel.groups import Groups
from quarrel.parallel.hosts import Far, Hosts
from quarrel.parallel.meeting import Meeting, store_at
from quarrel.parallel.messages import Message, pack, unpack

log = logging.getLogger("quarrel")

STUCK_SECONDS = 1800.0
"""A member that is silent, or in one step, for so long is ended. A step may wait for another member that compiles."""
_END_SECONDS = 5.0
_PLAIN = (BackendUnavailable, OutOfMemory, QuarrelError, UnsupportedModel)
"""Errors of another process that are raised here as they are."""


@dataclass(frozen=True)
class Work:
    """What every member has to know."""

    paths: tuple[Path, ...]
    backend: str
    compute: ComputeChoice
    ranks: int
    split: Split = "auto"
    stages: int = 1
    """Of a pipeline, `ranks // stages` members each."""
    hosts: str | None = None
    """A Ray cluster whose hosts have a stage each, this machine the last one; None is one machine for all."""
    threads: int | None = None
    """Of each process, on a CPU."""
    peer_sums: bool = True
    """Small sums of GPUs in one launch, where they reach each other's memory over NVLink (`group.py`)."""


class Member:
    """Another process, of this machine or of another host, as the first one sees it."""

    def __init__(self, rank: int, child: Child | Far, on_lost: Callable[[Member], None]) -> None:
        self.rank, self._child, self._on_lost = rank, child, on_lost
        self.name = f"device {rank}" + (f" on {child.host} ({child.address})" if isinstance(child, Far) else "")
        self.lost: str | None = None
        self._error: Json = None
        self._answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._watch = Watch(STUCK_SECONDS, self._end_stuck)
        threading.Thread(target=self._listen, name=f"quarrel-rank-{rank}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, message: bytes) -> None:
        """Raises EngineFault when it is gone."""
        try:
            self._child.link.send(message)
        except OSError:
            raise self.fault() from None

    def wait(self, do: str) -> Message:
        """Its next answer. Raises what it failed with."""
        answer = self._answers.get()
        if answer is None:
            raise self.fault()
        assert answer["do"] == do, answer
        return answer

    def fault(self) -> QuarrelError:
        """What it failed with, or that it is gone."""
        if self._error is not None:
            error = unpack_error(self._error)
            if type(error) in _PLAIN and error_kind(self._error[0]):
                return type(error)(f"{self.name}: {error}")
        why = self.lost or "it does not answer"
        return EngineFault(f"the process of {self.name} is lost ({why}): its share of the model is gone with it")

    def close(self) -> None:
        """Ends the process, which ends by itself when its link is closed."""
        self._watch.end()
        self._child.link.cut()
        self._child.end(_END_SECONDS)
        self._child.link.close()

    def _end_stuck(self, seconds: float) -> None:
        self.lost = f"it made no progress for {seconds:.0f} s"
        if isinstance(self._child, Child):
            self._child.process.kill()
        self._child.link.cut()

    def _listen(self) -> None:
        while (data := self._child.link.receive()) is not None:
            message = unpack(data)
            assert not isinstance(message, tuple)
            if message["do"] == "beat":
                self._watch.heard(message["phase"], message["seconds"])
            elif message["do"] == "fault":
                self._error = message["error"]
                self.lost = "{}: {}".format(*self._error)
                break
            else:
                self._answers.put(message)
        self._watch.end()
        if self.lost is None:
            self.lost = "it ended"
        self._answers.put(None)
        self._on_lost(self)


class Team:
    """The members of one model, this process first. Close it, or the step that was compiled for it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.folder = Path(tempfile.mkdtemp(prefix="quarrel-"))
        self.meeting, self.groups = Meeting(str(self.folder)), Groups()
        self._hosts: Hosts | None = None
        self._store: Any = None
        self._closed = False
        self._free: int | None = None
        self._lost = threading.Event()
        self._first: Member | None = None  # lost; others end after it, and because of it
        self._lock = threading.Lock()
        self.members: list[Member] = []
        try:
            near = work.ranks if work.hosts is None else work.ranks // work.stages
            self.members += [Member(rank, spawn("quarrel.parallel.worker"), self._lose) for rank in range(1, near)]
            addresses: dict[int, str] = {}
            if work.hosts is not None:
                self._hosts = hosts = Hosts(work.hosts, work.stages, near, gpus=work.backend == "triton")
                self._store, port = store_at(hosts.address)
                self.meeting = Meeting("", hosts.address, hosts.address, port)
                self.members += [Member(far.rank, far, self._lose) for far in hosts.members]
                addresses = {far.rank: far.address for far in hosts.members}
            start = {**vars(work), "paths": [str(p.absolute()) for p in work.paths]}
            sizes = [p.stat().st_size if p.is_file() else None for p in work.paths]
            for member in self.members:
                meeting = replace(self.meeting, address=addresses.get(member.rank, self.meeting.address))
                place = {"rank": member.rank, "device": member.rank % near, "meeting": vars(meeting)}
                member.send(pack(do="start", **place, **start, sizes=sizes))
        except BaseException:
            self.close()
            raise

    def free_bytes(self) -> int:
        """The least that any other member has."""
        if self._free is None:
            self._free = min(int(member.wait("free")["bytes"]) for member in self.members)
        return self._free

    def send(self, message: bytes, members: Sequence[Member] | None = None) -> None:
        """Sends every member, or every one of these, the same. Raises EngineFault."""
        for member in self.members if members is None else members:
            member.send(message)

    def fault(self, patience: float = 0.0) -> QuarrelError | None:
        """Why the team cannot go on, if it cannot; waits so many seconds for a reason."""
        if patience:
            self._lost.wait(patience)
        found = self._first or next((m for m in self.members if m.lost is not None), None)
        return None if found is None else found.fault()

    def stop(self) -> None:
        """Ends every other process; whatever waits for them here ends too."""
        for member in self.members:
            member.close()
        if self._hosts is not None:
            self._hosts.close()

    def close(self) -> None:
        """Ends every other process and gives everything back. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.stop()
        self.groups.close()
        self._store = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _lose(self, member: Member) -> None:
        """A member is gone: whatever this process waits for on the device must end."""
        with self._lock:
            closed, self._first = self._closed, self._first or member
        if not closed:
            log.error("the process of %s is lost: %s", member.name, member.lost)
        self._lost.set()
        if not closed:
            self.groups.abort()
