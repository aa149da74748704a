"""The read bandwidth of a backend's memory, measured beside the speeds that are compared with it."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from quarrel.ops.registry import backend as backend_named
from quarrel.ops.step import Backend

HOST_BYTES = 1 << 30
DEVICE_BYTES = 4 << 30
"""Far more than any cache; a quarter of the free memory if that is less."""


def read_bandwidth(backend: Backend, rounds: int = 5) -> tuple[float, list[float]]:
    """Bytes a second: the median, and every round."""
    free = backend.free_bytes() // 4
    if backend.name == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        speeds = importlib.import_module("quarrel.bench.read_cuda").read_speeds(min(DEVICE_BYTES, free), rounds)
    elif backend.name == "cpu":
        read = importlib.import_module("quarrel.bench.read_cpu").read_speed
        data = np.ones(min(HOST_BYTES, free), np.uint8)
        speeds = [read(backend, data) for _ in range(rounds + 1)][1:]
    elif backend.name == "mlx" and backend.unavailable() is None:
        speeds = importlib.import_module("quarrel.bench.read_mlx").read_speeds(min(DEVICE_BYTES, free), rounds)
    else:
        speeds = _plain(np.ones(min(HOST_BYTES, free) // 8, np.int64), rounds)
    return median(speeds), speeds


def host_bandwidth(threads: int | None = None) -> float:
    """Bytes a second of the host's memory, read by so many threads, or one for each core."""
    return read_bandwidth(backend_named("cpu", threads), 2)[0]


def _plain(data: np.ndarray[tuple[int], np.dtype[np.int64]], rounds: int) -> list[float]:
    """With one thread, where a backend has no measurement of its own."""

    def timed(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return [data.nbytes / timed(data.max) for _ in range(rounds)]
