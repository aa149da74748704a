"""A member that is not the first: a process of its own, which runs what it is told, and ends when nobody tells it anything.

python -m quarrel.parallel.worker FD          FD: its end of a socket pair
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from quarrel.errors import QuarrelError
from quarrel.gguf import GGUFFile
from quarrel.models import ModelSpec, Tensors, assemble, read_spec
from quarrel.models.shard import shard
from quarrel.ops.registry import backend as backend_named
from quarrel.ops.step import Limits, Pending, Step
from quarrel.ops.windows import as_planned
from quarrel.parallel import wire


def device_of(backend: str, rank: int) -> Any:
    """The torch device of a rank, made the current one."""
    import torch

    if backend != "triton" or not torch.cuda.is_available():
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if rank >= found:
        raise QuarrelError(f"this machine has {found} GPUs: use a smaller tensor_parallel")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


class Worker:
    """One member's life."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._pending: Pending | None = None
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self) -> None:
        """Until the first process is gone."""
        started = self._next()
        device = device_of(started["backend"], started["rank"])
        backend = backend_named(started["backend"], started["threads"])
        reason = backend.unavailable()
        if reason is not None:
            raise QuarrelError(f"backend {backend.name} cannot run: {reason}")
        wire.send(self._link, wire.words(do="free", bytes=backend.free_bytes()))
        go = self._next()
        # Its tensors are on this device from now on, and its sums with those of the others.
        from quarrel.parallel.group import TorchGroup

        place = (started["rank"], started["ranks"], device)
        group = TorchGroup(Path(started["folder"]), *place, started["one_shot"])
        backend.join(group)  # type: ignore[attr-defined]
        with GGUFFile.open([Path(p) for p in started["paths"]]) as file:
            whole = read_spec(file, go["n_ctx"])
            assert isinstance(whole, ModelSpec)
            spec, tensors = shard(whole, Tensors(file), started["rank"], started["ranks"], started["split"])
            limits = Limits(**go["limits"])
            program = as_planned(assemble(spec, tensors), limits.window_groups)
            step = backend.compile(program, tensors, limits, started["compute"])
            wire.send(self._link, wire.words(do="ready"))
            while True:
                self._do(step, wire.parse(self._messages.get()))

    def _do(self, step: Step, message: Any) -> None:
        if isinstance(message, tuple):
            # Results are everyone's: nobody asks for this one's. But as many are on their way as the first process has.
            before, self._pending = self._pending, step.launch(*message)
            if before is not None:
                before.result()
        elif message["do"] == "copy_blocks":
            step.copy_blocks([(a, b) for a, b in message["pairs"]])
        elif message["do"] == "copy_states":
            step.copy_states([(a, b) for a, b in message["pairs"]])

    def _next(self) -> wire.Words:
        message = wire.parse(self._messages.get())
        assert not isinstance(message, tuple)
        return message

    def _listen(self) -> None:
        while True:
            message = wire.receive(self._link)
            if message is None:
                # Whatever this process waits for, nobody will read it.
                os._exit(0)
            self._messages.put(message)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    try:
        Worker(link).run()
    except BaseException as error:
        with contextlib.suppress(OSError):
            wire.send(link, wire.words(do="fault", kind=type(error).__name__, said=str(error) or repr(error)))
        os._exit(1)


if __name__ == "__main__":
    main()
