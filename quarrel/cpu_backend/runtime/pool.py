"""Threads that run steps: started once, asleep when idle, and never waited for unless they hold a chunk of work."""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from quarrel.cpu_backend.runtime import jit, runner
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.numa import Placement

ANYWHERE = Placement(())

_Start = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_Run = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def aligned(size: int, align: int = 64) -> np.ndarray:
    """Untouched bytes at an aligned address."""
    raw = np.empty(size + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + size]


@dataclass(frozen=True)
class StageTable:
    """Stages and jobs as the runner reads them, and what must stay alive while it does."""

    stages: np.ndarray  # int64 [stages, 2]
    jobs: np.ndarray  # int64 [jobs, 5]
    header: np.ndarray  # int64
    scratch: int
    """Bytes of scratch memory that the widest kernel needs."""
    keep: tuple[Any, ...] = ()


class Pool:
    """`threads` threads, the caller's included. One step runs at a time."""

    def __init__(self, level: Level, threads: int, placement: Placement = ANYWHERE) -> None:
        self.level, self.threads = level, threads
        self._lock = threading.Lock()
        self._block = aligned(runner.POOL_BYTES)
        self._block[:] = 0
        self._words = self._block.view(np.int64)
        self._words[runner.TICKET // 8] = runner.IDLE << runner.COUNT_BITS
        libc = ctypes.CDLL(None)
        for word, function in ((runner.YIELD, libc.sched_yield), (runner.CLOCK, libc.clock_gettime)):
            self._words[word // 8] = ctypes.cast(function, ctypes.c_void_p).value
        per_thread = aligned(runner.THREAD_BYTES * threads)
        per_thread[:] = 0
        self._threads = per_thread.view(np.int64).reshape(threads, -1)
        self._asleep = self._threads[:, runner.ASLEEP // 8]
        self._scratch: list[np.ndarray] = []
        self._grow(1 << 16)
        own = (
            jit.Function("runner/start", runner.emit_start, 1),
            jit.Function("runner/run", partial(runner.emit_run, level)),
        )
        start, run = jit.addresses(own, level, threads)
        self._start, self._run = _Start(start), _Run(run)
        self._wake: list[queue.SimpleQueue[bool]] = []
        self._workers: list[threading.Thread] = []
        for index in range(1, threads):
            wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
            begin = partial(placement.place, index, threads)
            work = (self._run, self._block, self._threads[index], wake, begin)
            worker = threading.Thread(target=_work, args=work, name=f"quarrel-cpu-{index}", daemon=True)
            self._wake.append(wake)
            self._workers.append(worker)
            worker.start()
        self._finalizer = weakref.finalize(self, _stop, self._wake)

    def _grow(self, size: int) -> None:
        if self._scratch and len(self._scratch[0]) >= size:
            return
        self._scratch = [aligned(size) for _ in range(self.threads)]
        self._threads[:, runner.SCRATCH // 8] = [s.ctypes.data for s in self._scratch]

    def run(self, table: StageTable, times: np.ndarray | None = None) -> None:
        """Runs one step to its end, on this thread and the workers.

        times: int64 `[stages + 1, 2]`, filled with the seconds and nanoseconds at which each stage began, and the last
        one ended, by the monotonic clock. A stage without chunks begins when its successor does.
        """
        with self._lock:
            self._grow(table.scratch)
            words = self._words
            words[runner.STAGES // 8] = table.stages.ctypes.data
            words[runner.JOBS // 8] = table.jobs.ctypes.data
            words[runner.HEADER // 8] = table.header.ctypes.data
            words[runner.COUNT // 8] = len(table.stages)
            words[runner.TIMES // 8] = 0 if times is None else times.ctypes.data
            self._start(self._block.ctypes.data)
            if self._asleep.any():
                for index in np.flatnonzero(self._asleep):
                    self._asleep[index] = 0
                    self._wake[index - 1].put(True)
            self._run(self._block.ctypes.data, self._threads.ctypes.data, 0)

    def close(self) -> None:
        """Ends the workers."""
        self._finalizer()
        for worker in self._workers:
            worker.join()


def _work(
    run: Any, block: np.ndarray, thread: np.ndarray, wake: queue.SimpleQueue[bool], begin: Callable[[], None]
) -> None:
    """A worker's life. A wake-up too many is harmless: it looks for work and goes back to sleep."""
    begin()
    going = True
    while going:
        run(block.ctypes.data, thread.ctypes.data, 1)
        going = wake.get()
        thread[runner.ASLEEP // 8] = 0


def _stop(wakes: list[queue.SimpleQueue[bool]]) -> None:
    for wake in wakes:
        wake.put(False)
