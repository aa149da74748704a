"""How fast the CPU backend's threads read memory: the same pool and the same vectors as its kernels."""

from __future__ import annotations

import time

import numpy as np

from quarrel.cpu_backend.backend import CpuBackend
from quarrel.cpu_backend.runtime.abi import Fields, KernelDef
from quarrel.cpu_backend.runtime.ir import I32, Kernel, Val, vec
from quarrel.cpu_backend.runtime.pool import StageTable

PIECE = 1 << 18


def _kernel() -> KernelDef:
    """Chunk c reads PIECE bytes and does next to nothing with them."""

    def body(k: Kernel, a: Fields, chunk: Val, scratch: Val) -> None:
        at = a.data + chunk * PIECE
        sums = [k.var(k.zero(vec(I32, 16))) for _ in range(4)]
        with k.range(0, PIECE, 256) as i:
            for j, total in enumerate(sums):
                total.v = total.v ^ k.load(at + i, vec(I32, 16), 64 * j)
        k.store((sums[0].v ^ sums[1].v) ^ (sums[2].v ^ sums[3].v), scratch)

    return KernelDef("bench/read", ("data",), body)


def read_speed(backend: CpuBackend, data: np.ndarray) -> float:
    """Bytes a second over all threads, once over `data`."""
    kernel, pool = _kernel(), backend._pool
    args = kernel.pack({"data": int(data.ctypes.data)})
    chunks = data.nbytes // PIECE
    jobs = np.array([[kernel.address(pool.level), args.ctypes.data, 0, 1, 1]], np.int64)
    table = StageTable(np.array([[0, 1]], np.int64), jobs, np.array([chunks], np.int64), 4096, (args, data))
    start = time.perf_counter()
    pool.run(table)
    return chunks * PIECE / (time.perf_counter() - start)
