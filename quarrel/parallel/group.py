"""A group over torch.distributed: NCCL between GPUs, gloo between CPU processes. No default group: models do not share one.

Small sums on GPUs that reach each other's memory take one kernel that reads every member's part (PyTorch's symmetric
memory); NCCL's own take about three times as long there. NVLink multicast is left alone.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

log = logging.getLogger("quarrel")

PATIENCE = timedelta(minutes=30)
"""How long a member waits for another that lives, such as one that compiles its kernels for the first time."""
ONE_SHOT_BYTES = 256 << 10
"""Sums of at most this many bytes are made by one kernel."""


_SETTINGS = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # A member that is gone is told by its link; NCCL's own watch would end this process too.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class TorchGroup:
    """See `ops.collective.Group`. Buffers are NumPy arrays (gloo) or CUDA tensors (NCCL)."""

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        store = dist.FileStore(str(folder / "store"), size)
        self._lock = threading.Lock()
        self._few: _OneShot | None = None
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
        few = _one_shot(store, rank, size, device)
        if self._agreed(few is not None, device):
            assert few is not None
            probe = torch.full((64,), rank + 1.0, device=device)
            few.all_reduce(probe)
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
        if self._few is not None and tensor.numel() * 4 <= ONE_SHOT_BYTES:
            self._few.all_reduce(tensor)
            return
        self._wait(self._ranks.allreduce([tensor], self._options))

    def broadcast(self, buffer: Any, source: int) -> None:
        self._from.rootRank = source
        self._wait(self._ranks.broadcast([_tensor(buffer)], self._from))

    def abort(self) -> None:
        """Ends what waits for a member that is gone. Safe for threads."""
        with self._lock:
            ranks, self._ranks = self._ranks, None
        if self._few is not None:
            self._few.release()
        if ranks is not None:
            ranks.abort()

    def close(self) -> None:
        """Leaves; members may do so one after the other."""
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


class _OneShot:
    """Sums of a few values: each member copies its part to where the others can read it, and adds all parts."""

    def __init__(self, shared: torch.Tensor, handle: Any, name: str) -> None:
        self._shared, self._handle, self._name = shared, handle, name

    def all_reduce(self, tensor: torch.Tensor) -> None:
        shared = self._shared[: tensor.numel()]
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, tensor, "sum", self._name, tensor)

    def release(self) -> None:
        """Gives every signal that a member which is gone cannot give, so that no kernel of this one waits for ever."""
        own = self._pad(self._handle.rank)
        with torch.cuda.device(own.device), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10_000):
                own.fill_(1)
                for rank in range(self._handle.world_size):
                    if rank != self._handle.rank:
                        self._pad(rank).zero_()
                if torch.cuda.default_stream().query():
                    return

    def _pad(self, rank: int) -> torch.Tensor:
        pad: torch.Tensor = self._handle.get_signal_pad(rank)
        return pad.view(torch.int32)


def _one_shot(store: Any, rank: int, size: int, device: torch.device) -> _OneShot | None:
    """None where GPUs do not reach each other's memory, or this PyTorch has no such sums."""
    if os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] != "1":
        return None
    try:
        from torch._C._distributed_c10d import _SymmetricMemory

        name = f"quarrel-{os.path.basename(os.path.dirname(store.path))}"
        own = dist.PrefixStore("one-shot", store)
        own.set_timeout(timedelta(seconds=20))
        _SymmetricMemory.set_group_info(name, rank, size, own)
        shared = _SymmetricMemory.empty_strided_p2p((ONE_SHOT_BYTES // 4,), (1,), torch.float32, device, name)
        return _OneShot(shared, _SymmetricMemory.rendezvous(shared, name), name)
    except (AttributeError, ImportError, RuntimeError) as error:
        log.info("sums over GPUs are NCCL's: %s", error)
        return None
