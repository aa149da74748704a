"""How kernels are executed: one frozen object, taken from the caller or from the enclosing `install`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from quarrel.errors import RequestError

if TYPE_CHECKING:
    from tools.metal_emulator.kernel import Launch


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


@dataclass(frozen=True)
class Session:
    """The settings in force and what has been launched under them."""

    settings: Settings = Settings()
    launches: list[Launch] = field(default_factory=list)


# A kernel object outlives the context it is first used in (backends cache them), so it asks at each call.
_SESSION: ContextVar[Session | None] = ContextVar("metal_emulator_session", default=None)


def current_session() -> Session:
    """That of the enclosing `session`; outside of one, and in a new thread, one with the default settings."""
    return _SESSION.get() or Session()


@contextmanager
def session(settings: Settings) -> Iterator[Session]:
    """Settings for every kernel called inside that has none of its own."""
    current = Session(settings)
    token = _SESSION.set(current)
    try:
        yield current
    finally:
        _SESSION.reset(token)
