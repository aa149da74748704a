"""Kernels compiled before their first launch, by several processes at once, into Triton's cache on disk.

A process compiles one kernel at a time, as half of that is Python: a 7B model wants 40 kernels, of a second each, before
its second token. The processes are forks of this one, which has imported what takes seconds to import and knows what is to
be compiled; they never touch the device, and exit when their work is done. Whatever goes wrong in one of them, a kernel
that is not in the cache is compiled where it is launched.
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait as ready
from pathlib import Path
from typing import Any

import triton
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

from quarrel.child.phase import compile_begins, compile_ends
from quarrel.triton_backend.runtime.launch import Grid, options

Job = Callable[[], object]
"""Compiles one kernel, or finds it in the cache."""
PATIENCE = 120.0
"""Seconds to wait for a kernel: no kernel takes a tenth of that, so whoever compiles it has died or hangs."""


class _Noted(triton.AsyncCompileMode):
    """Keeps what launches would have compiled."""

    def __init__(self) -> None:
        super().__init__(None)
        self.jobs: dict[str, Job] = {}

    def submit(self, key: str, compile_fn: Callable[[], Any], *rest: object) -> None:
        self.jobs.setdefault(key, partial(_made, compile_fn))


def _made(compile_fn: Callable[[], Any]) -> None:
    """Compiles a kernel, and what starts it: Triton 3.6 has a C compiler make that for each signature (0.17 s)."""
    kernel = compile_fn()
    driver.active.launcher_cls(kernel.src, kernel.metadata)


def launch_nothing(
    kernel: Any, grid: Grid, *args: Any, warps: int = 4, stages: int = 2, early: bool | None = None, **named: Any
) -> None:
    """In place of `launch`: a kernel that is not compiled yet is noted. Tensors need no storage."""
    if all(grid):
        if early is not None:
            named["PDL"] = early
        kernel.run(*args, grid=grid, warmup=True, **named, **options(warps, stages, early))


def uncompiled(work: Callable[[], None]) -> dict[str, Job]:
    """What is to be compiled for the `launch_nothing`s of `work`, by key, without what the cache on disk has already."""
    with _Noted() as noted:
        try:
            work()
        finally:
            compile_ends()  # what is noted is reported as if it were compiled
    return {key: job for key, job in noted.jobs.items() if not _on_disk(key)}


def _on_disk(key: str) -> bool:
    folder = Path(get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).cache_dir)
    return any(folder.glob("__grp__*"))


class Compilers:
    """Processes that work `jobs` off in their order, one for each core; `wait` puts some in front."""

    def __init__(self, jobs: Mapping[str, Job], processes: int | None = None, nice: int = 5) -> None:
        self._nice = nice
        self._jobs = dict(jobs)
        self._waiting = list(self._jobs)
        self._done = {key: threading.Event() for key in self._jobs}
        self._lock = threading.Lock()
        self.seconds: dict[str, float] = {}
        """What each kernel took."""
        count = min(processes or len(os.sched_getaffinity(0)), len(self._jobs))
        self.children: list[_Child] = []
        with suppress(OSError):  # with fewer, or none, the rest is compiled where it is launched
            for _ in range(count):
                self.children.append(self._fork())
        threading.Thread(target=self._feed, name="compilers", daemon=True).start()

    def __contains__(self, key: str) -> bool:
        return key in self._done

    def first(self, keys: Iterable[str]) -> list[str]:
        """Puts these in front, and returns those that are among the jobs."""
        wanted = [key for key in keys if key in self._done]
        with self._lock:
            self._waiting = [k for k in wanted if k in self._waiting] + [k for k in self._waiting if k not in wanted]
        return wanted

    def wait(self, keys: Iterable[str]) -> None:
        """Returns when these are compiled, or cannot be."""
        wanted, until = self.first(keys), time.monotonic() + PATIENCE
        compile_begins()
        for key in wanted:
            self._done[key].wait(max(0.0, until - time.monotonic()))
        compile_ends()

    def close(self) -> None:
        """Ends the processes, at once."""
        with self._lock:
            self._waiting.clear()
        for child in self.children:
            child.kill()

    def _fork(self) -> _Child:
        to_child, from_child = os.pipe(), os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the child uses none of theirs
            try:
                pid = os.fork()
            except OSError:
                for end in (*to_child, *from_child):
                    os.close(end)
                raise
        if pid == 0:
            _serve(list(self._jobs.values()), to_child[0], from_child[1], self._nice)
        os.close(to_child[0])
        os.close(from_child[1])
        return _Child(pid, to_child[1], from_child[0])

    def _feed(self) -> None:
        """Hands out one job after the other to each child, until there are no more."""
        numbers = {key: i for i, key in enumerate(self._jobs)}
        working: dict[int, tuple[_Child, str, float]] = {}

        def give(child: _Child) -> None:
            with self._lock:
                key = self._waiting.pop(0) if self._waiting else None
            if key is None or not child.give(numbers[key]):
                child.end()
                if key is not None:
                    self._done[key].set()
            else:
                working[child.answers] = child, key, time.perf_counter()

        for child in self.children:
            give(child)
        while working:
            for answers in ready(list(working)):
                child, key, began = working.pop(answers)
                alive = bool(os.read(answers, 1))
                self.seconds[key] = time.perf_counter() - began
                self._done[key].set()
                if alive:
                    give(child)
                else:
                    child.end()
        for event in self._done.values():
            event.set()


class _Child:
    """The parent's end."""

    def __init__(self, pid: int, orders: int, answers: int) -> None:
        self.answers = answers
        self._pid, self._orders = pid, orders
        self._lock = threading.Lock()
        self.ended = False

    def give(self, number: int) -> bool:
        """Whether the child has taken it."""
        try:
            os.write(self._orders, number.to_bytes(4, "little"))
        except OSError:
            return False
        return True

    def kill(self) -> None:
        with self._lock:
            if not self.ended:
                os.kill(self._pid, signal.SIGKILL)

    def end(self) -> None:
        os.close(self._orders)
        os.close(self.answers)
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)  # its number stays its own, whoever kills it meanwhile
        with self._lock:
            os.waitpid(self._pid, 0)
            self.ended = True


def _serve(jobs: list[Job], orders: int, answers: int, nice: int) -> None:
    """The child: works until the parent has no more for it, or is gone. Never returns."""
    try:
        gc.disable()  # what it would collect is the parent's, on the device
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        low, high = sorted((orders, answers))
        for first, last in ((3, low), (low + 1, high), (high + 1, os.sysconf("SC_OPEN_MAX"))):
            os.closerange(first, last)  # sockets, and the other children's pipes
        os.nice(nice)
        while number := os.read(orders, 4):
            with suppress(Exception):  # it is raised again where the kernel is launched
                jobs[int.from_bytes(number, "little")]()
            os.write(answers, b"1")
    finally:
        os._exit(0)
