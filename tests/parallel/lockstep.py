"""Several members of a group as threads of one process, each with a backend of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class Member:
    """A group whose members meet at a barrier (`ops.collective.Group`); buffers are NumPy arrays or CPU tensors."""

    def __init__(
        self,
        rank: int,
        size: int,
        shared: dict[int, np.ndarray],
        barrier: threading.Barrier,
        turn: threading.Lock | None = None,
    ) -> None:
        self.rank, self.size, self._shared, self._barrier, self._turn = rank, size, shared, barrier, turn

    def all_reduce(self, buffer: Any) -> None:
        self._meet(buffer, lambda parts: np.sum([parts[r] for r in range(self.size)], 0, np.float32))

    def all_reduce_add(self, target: Any, residual: Any, part: Any, scale: float) -> bool:
        return False

    def broadcast(self, buffer: Any, source: int) -> None:
        self._meet(buffer, lambda parts: parts[source])

    def _meet(self, buffer: Any, combine: Callable[[dict[int, np.ndarray]], np.ndarray]) -> None:
        array = np.asarray(buffer)
        self._shared[self.rank] = array.copy()
        if self._turn is not None:
            self._turn.release()
        self._barrier.wait(60)
        result = combine(self._shared)
        self._barrier.wait(60)
        if self._turn is not None:
            self._turn.acquire()
        array[...] = result


def together(size: int, run: Callable[[Member], T], *, in_turn: bool = False) -> list[T]:
    """`run` on every member at once; what each returns. in_turn: one computes while the others wait."""
    barrier, shared = threading.Barrier(size), dict[int, np.ndarray]()
    turn = threading.Lock() if in_turn else None

    def one(rank: int) -> T:
        try:
            with turn or nullcontext():
                return run(Member(rank, size, shared, barrier, turn))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        failures = [f.exception() for f in futures]
        for failure in sorted((f for f in failures if f), key=lambda f: isinstance(f, threading.BrokenBarrierError)):
            raise failure
        return [f.result() for f in futures]
