"""A group over torch.distributed: NCCL between GPUs, gloo between CPU processes. No default group: models do not share one.

Small sums on GPUs that reach each other's memory over NVLink are one launch of the backend's (`ops.collective.PeerSums`),
for which processes open each other's memory by CUDA's handles. NVLink multicast is not used.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from quarrel.ops.collective import PeerSums
from quarrel.parallel.meeting import Meeting

log = logging.getLogger("quarrel")

PATIENCE = timedelta(minutes=30)
"""How long a member waits for another that lives, such as one that compiles its kernels for the first time."""


_AHEAD = 4
"""Sends that nobody has taken yet, after which the next one waits."""
_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED."""
_SETTINGS = {
    # The link notices a member that is gone; NCCL's own watchdog would end this process too.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class TorchGroup:
    """See `ops.collective.Group`. Buffers are NumPy arrays (gloo) or CUDA tensors (NCCL)."""

    def __init__(
        self,
        meeting: Meeting,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        peer_sums: type[PeerSums] | None = None,
        sums: bool = True,
    ) -> None:
        """sums: whether the members add; else they only send and receive."""
        self.rank, self.size, self._device = rank, size, device
        store = meeting.store(name, size)
        store.set_timeout(timedelta(minutes=2))
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._peers: PeerSums | None = None
        self._sent: list[tuple[Any, torch.Tensor]] = []  # what may not have been taken yet
        self._last_sent: torch.cuda.Event | None = None
        self._options = dist.AllreduceOptions()
        self._options.asyncOp = False
        self._from = dist.BroadcastOptions()
        self._from.asyncOp = False
        if device.type != "cuda":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.address)]
            options._timeout = PATIENCE
            self._ranks: Any = dist.ProcessGroupGloo(store, rank, size, options)
            return
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        self._ranks = dist.ProcessGroupNCCL(store, rank, size, options)
        if not sums:
            return
        # The first sum makes the connections, which a graph could not.
        self.all_reduce(torch.zeros(1, device=device))
        peers = None if peer_sums is None else _peer_sums(peer_sums, store, rank, size, device)
        if peer_sums is not None and self._agreed(peers is not None, device):
            assert peers is not None
            probe = torch.full((64,), rank + 1.0, device=device)
            peers.sum(probe, probe)
            if self._agreed(bool((probe == size * (size + 1) / 2).all().item()), device):
                self._peers = peers
        torch.cuda.synchronize(device)

    def _agreed(self, here: bool, device: torch.device) -> bool:
        """Whether it is so for every member."""
        members = torch.tensor([float(here)], device=device)
        self.all_reduce(members)
        return int(members.item()) == self.size

    @property
    def how(self) -> str:
        """What adds, in words."""
        name: str = self._ranks.name()
        return f"{name} and one-shot sums" if self._peers is not None else name

    def all_reduce(self, buffer: Any) -> None:
        tensor = _tensor(buffer)
        if self._peers is not None and tensor.numel() <= self._peers.most:
            self._peers.sum(tensor, tensor)
            return
        self._wait(self._ranks.allreduce([tensor], self._options))

    def all_reduce_add(self, target: Any, residual: Any, part: Any, scale: float) -> bool:
        """`target = residual + scale * sum(part)` in one launch, if there is one for sums of this size."""
        if self._peers is None or part.numel() > self._peers.most:
            return False
        self._peers.sum(target, part, residual, scale)
        return True

    def broadcast(self, buffer: Any, source: int) -> None:
        self._from.rootRank = source
        self._wait(self._ranks.broadcast([_tensor(buffer)], self._from))

    @property
    def on_device(self) -> bool:
        """Whether members send tensors of their GPUs."""
        on: str = self._device.type
        return on == "cuda"

    def connect_chain(self) -> None:
        """Makes the connections of a chain, whose first member is the last stage: each receives from the one before and
        sends to the next."""
        probe = (1,)
        if self.rank != 1:
            self.receive((self.rank - 1) % self.size, probe)
        if self.rank:
            self.send(torch.zeros(probe, device=self._device), (self.rank + 1) % self.size)

    def send(self, buffer: Any, to: int) -> None:
        """Sends a buffer to one member, who may receive it later: in order. Until then a CPU's must not change; a GPU's
        may, as what is launched next waits."""
        tensor = _tensor(buffer)
        if tensor.is_cuda:
            self._wait(self._ranks.send([tensor], to, 0))
            self.wait_sent()
            self._last_sent = torch.cuda.Event()
            self._last_sent.record()
            return
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        while len(self._sent) >= _AHEAD:
            self._sent.pop(0)[0].wait()
        self._sent.append((self._ranks.send([tensor], to, 0), tensor))

    def wait_sent(self) -> None:
        """Waits until the last send from this member's GPU is over; a fault of the device is raised here."""
        last, self._last_sent = self._last_sent, None
        if last is not None:
            last.synchronize()

    def receive(self, source: int, shape: tuple[int, ...]) -> Any:
        """What that member sends next, float32 of this shape: an array, or of GPUs a tensor, which what is launched next
        waits for."""
        gpu = self.on_device
        buffer: Any = torch.empty(shape, device=self._device) if gpu else np.empty(shape, np.float32)
        self._wait(self._ranks.recv([_tensor(buffer)], source, 0))
        return buffer

    def abort(self) -> None:
        """Ends what waits for a member that is gone, until the group is closed. Safe for threads."""
        with self._lock:
            ranks, self._ranks, peers = self._ranks, None, self._peers
        if ranks is not None:
            ranks.abort()
        if peers is not None:
            self._unblock(peers)

    def _unblock(self, peers: PeerSums) -> None:
        device = self._device
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            # A step may still be launched now, so this repeats until none can be.
            while not self._closed.wait(0.0005):
                peers.release()
                torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Leaves; members may do so one after the other."""
        self._closed.set()
        with self._lock:
            ranks, self._ranks, self._peers = self._ranks, None, None
        if ranks is not None and ranks.name() == "nccl":
            # The others are gone already: leaving in order would wait for them.
            ranks.abort()

    @staticmethod
    def _wait(work: Any) -> None:
        if work is not None:
            work.wait()


def _tensor(buffer: Any) -> torch.Tensor:
    return torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer


def _atomics(device: int, other: int) -> bool:
    """Whether compare-and-swap on the other's memory is one, which NVLink promises and PCIe does not."""
    cuda, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    return cuda.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, device, other) == 0 and found.value == 1


def _peer_sums(kind: type[PeerSums], store: Any, rank: int, size: int, device: torch.device) -> PeerSums | None:
    """None where GPUs do not reach each other's memory, or not well enough."""
    words = kind.words(size)
    try:
        if not all(_atomics(device.index, other) for other in range(size) if other != rank):
            return None
        own = torch.zeros(words, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        _, *sent = own.untyped_storage()._share_cuda_()
        texts = [part.hex() if isinstance(part, bytes) else part for part in sent]
        store.set(f"memory-{rank}", json.dumps([*texts, own.storage_offset()]))
        memory = []
        for other in range(size):
            if other == rank:
                memory.append(own)
                continue
            *texts, offset = json.loads(store.get(f"memory-{other}"))
            parts = [bytes.fromhex(text) if isinstance(text, str) else text for text in texts]
            # Seen from this device, whichever it lies on.
            storage = torch.UntypedStorage._new_shared_cuda(device.index, *parts)
            seen = torch.empty(0, dtype=torch.int32, device=device)
            memory.append(seen.set_(storage, offset, (words,)))
        return kind(rank, memory)
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        log.info("all sums over GPUs are NCCL's: %s", error)
        return None
