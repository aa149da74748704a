"""How kernels are executed: one frozen object, taken from the caller or from the enclosing `install`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from quarrel.errors import RequestError


class Mode(Enum):
    """TYPECHECK compiles only, FAST executes, CHECK executes with every access watched."""

    TYPECHECK = "typecheck"
    CHECK = "check"
    FAST = "fast"


@dataclass(frozen=True)
class Settings:
    """`workers` 0 means every core in FAST mode; CHECK mode always has one worker, so its findings repeat exactly.

    `seed` picks a schedule: 0 runs threads in the order of their indices. `strict` reports SIMD-group operations that
    only part of the live lanes take part in. `alignment` is that of each buffer's first byte: 16 as MLX allocates,
    the item size to imitate a slice. `typecheck` runs the address-space check before a kernel's first call.
    """

    mode: Mode = Mode.FAST
    seed: int = 0
    workers: int = 0
    strict: bool = True
    flush_subnormals: bool = True
    alignment: int = 16
    timeout_s: float = 60.0
    typecheck: bool = False
    raise_on_findings: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise RequestError(f"a schedule seed is {self.seed}, but must lie in 0..2^32-1; choose a small number")
        if self.alignment not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            raise RequestError(f"buffer alignment is {self.alignment}, but must be a power of two from 1 to 256")
        if self.workers < 0 or self.timeout_s <= 0:
            raise RequestError(f"workers={self.workers} and timeout_s={self.timeout_s} must not be negative or zero")

    def worker_count(self) -> int:
        if self.mode is Mode.CHECK:
            return 1
        return self.workers or len(os.sched_getaffinity(0))
