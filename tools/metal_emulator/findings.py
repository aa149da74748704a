"""What is wrong with a kernel: the kind, the place in the Metal source, the threads, one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """In the order of the runtime's msl_kind, then what is found without running."""

    RACE = "race"
    WEAK_BARRIER = "weak barrier"
    OUT_OF_BOUNDS = "out of bounds"
    WRITE_TO_INPUT = "write to input"
    UNINITIALISED = "uninitialised read"
    MISALIGNED = "misaligned access"
    DIVERGENT_SIMD = "divergent SIMD operation"
    DIVERGENT_BARRIER = "divergent barrier"
    MISSED_BARRIER = "missed barrier"
    ABSENT_LANE = "absent lane"
    UNDEFINED = "undefined behaviour"
    THREADGROUP_MEMORY = "threadgroup memory"
    FAULT = "fault"
    TIMEOUT = "timeout"
    EMULATOR_LIMIT = "emulator limit"
    DOES_NOT_COMPILE = "does not compile"
    TYPE = "address space"
    NOT_METAL = "not Metal"
    REGISTERS = "registers"
    ORDER = "depends on the schedule"


@dataclass(frozen=True)
class ThreadId:
    """One GPU thread: its threadgroup's position in the grid, and its linear index there."""

    threadgroup: tuple[int, int, int]
    index: int

    def __str__(self) -> str:
        return (
            f"thread {self.index} (simdgroup {self.index // 32} lane {self.index % 32}) of threadgroup {self.threadgroup}"
        )


@dataclass(frozen=True)
class Finding:
    """`line` counts in `file`: NAME.metal is the kernel's `source` string, NAME.header its `header`.

    `calls` is the chain of inlined calls around that place, innermost first, as "file:line". `threads` holds the thread
    that was caught and, for a race, the one before it. `count` is how often it happened.
    """

    kind: Kind
    file: str
    line: int
    message: str
    threads: tuple[ThreadId, ...] = ()
    calls: tuple[str, ...] = ()
    count: int = 1

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "no place in the source"

    def __str__(self) -> str:
        via = "".join(f" <- {call}" for call in self.calls)
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.where}{via}: {self.kind.value}: {self.message}{times}"
