"""A group over torch.distributed: NCCL between GPUs, gloo between CPU processes. No default group: models do not share one.

Small sums on GPUs that reach each other's memory over NVLink are one launch (`triton_backend/one_shot.py`), for which
processes open each other's memory by CUDA's handles. NVLink multicast is left alone.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from quarrel.triton_backend.one_shot import OneShot

log = logging.getLogger("quarrel")

PATIENCE = timedelta(minutes=30)
"""How long a member waits for another that lives, such as one that compiles its kernels for the first time."""


_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED."""
_SETTINGS = {
    # A member that is gone is told by its link; NCCL's own watch would end this process too.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class TorchGroup:
    """See `ops.collective.Group`. Buffers are NumPy arrays (gloo) or CUDA tensors (NCCL)."""

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device, one_shot: bool = True) -> None:
        self.rank, self.size = rank, size
        store = dist.FileStore(str(folder / "store"), size)
        store.set_timeout(timedelta(minutes=2))
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._few: OneShot | None = None
        self._options = dist.AllreduceOptions()
        self._options.asyncOp = False
        self._from = dist.BroadcastOptions()
        self._from.asyncOp = False
        if device.type != "cuda":
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = PATIENCE
            self._ranks: Any = dist.ProcessGroupGloo(store, rank, size, options)
            return
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = PATIENCE
        self._ranks = dist.ProcessGroupNCCL(store, rank, size, options)
        # The first sum makes the connections, which a graph could not.
        self.all_reduce(torch.zeros(1, device=device))
        few = _one_shot(store, rank, size, device) if one_shot else None
        if one_shot and self._agreed(few is not None, device):
            assert few is not None
            probe = torch.full((64,), rank + 1.0, device=device)
            few.sum(probe, probe)
            if self._agreed(bool((probe == size * (size + 1) / 2).all().item()), device):
                self._few = few
        torch.cuda.synchronize(device)

    def _agreed(self, mine: bool, device: torch.device) -> bool:
        """Whether it is so for every member."""
        able = torch.tensor([float(mine)], device=device)
        self.all_reduce(able)
        return int(able.item()) == self.size

    @property
    def how(self) -> str:
        """Who adds."""
        name: str = self._ranks.name()
        return f"{name} and one-shot sums" if self._few is not None else name

    def all_reduce(self, buffer: Any) -> None:
        tensor = _tensor(buffer)
        if self._few is not None and tensor.numel() <= self._few.most:
            self._few.sum(tensor, tensor)
            return
        self._wait(self._ranks.allreduce([tensor], self._options))

    def all_reduce_add(self, target: Any, residual: Any, part: Any, scale: float) -> bool:
        """`target = residual + scale * sum(part)` in one launch, if that is quicker."""
        if self._few is None or part.numel() > self._few.most:
            return False
        self._few.sum(target, part, residual, scale)
        return True

    def broadcast(self, buffer: Any, source: int) -> None:
        self._from.rootRank = source
        self._wait(self._ranks.broadcast([_tensor(buffer)], self._from))

    def abort(self) -> None:
        """Ends what waits for a member that is gone, until the group is closed. Safe for threads."""
        with self._lock:
            ranks, self._ranks, few = self._ranks, None, self._few
        if ranks is not None:
            ranks.abort()
        if few is not None:
            self._unblock(few)

    def _unblock(self, few: OneShot) -> None:
        device = few.memory[few.rank].device
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            # A step may be launched while this begins, so it goes on until no more can be.
            while not self._closed.wait(0.0005):
                few.release()
                torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Leaves; members may do so one after the other."""
        self._closed.set()
        with self._lock:
            ranks, self._ranks, self._few = self._ranks, None, None
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


def _one_shot(store: Any, rank: int, size: int, device: torch.device) -> OneShot | None:
    """None where GPUs do not reach each other's memory, or not well enough."""
    from quarrel.triton_backend.one_shot import OneShot, words

    try:
        if not all(_atomics(device.index, other) for other in range(size) if other != rank):
            return None
        own = torch.zeros(words(size), dtype=torch.int32, device=device)
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
            memory.append(seen.set_(storage, offset, (words(size),)))
        return OneShot(rank, memory)
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        log.info("sums over GPUs are NCCL's alone: %s", error)
        return None
