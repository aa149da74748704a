"""A program on its way to a stage table: buffers with lifetimes, stages of jobs, and words that change per step."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from quarrel.cpu_backend.linear.activations import row_bytes
from quarrel.cpu_backend.linear.matvec import MATVEC_ROWS
from quarrel.cpu_backend.runtime import jit
from quarrel.cpu_backend.runtime.abi import KernelDef
from quarrel.cpu_backend.runtime.features import Level
from quarrel.cpu_backend.runtime.pool import StageTable, aligned
from quarrel.ops.contract import Operand, Value

Rows = np.ndarray
"""The live rows of a value, `[T, n]`, in place."""

AXES = ("T", "S", "R", "B", "L", "M")
"""Free axes whose live sizes stand in the step's header, each followed by four more words: see `Header`."""


class Header:
    """The words that change from step to step: axis sizes, and counts that a stage of the step computes."""

    WORDS = 5
    """Of each axis."""
    ONE = WORDS * len(AXES)

    def __init__(self) -> None:
        self.words = aligned(8 * 64).view(np.int64)
        self.words[:] = 0
        self.words[self.ONE] = 1
        self._used = self.ONE + 1
        self._sizes: Mapping[str, int] = {}

    @staticmethod
    def axis(name: str) -> int:
        """Word that holds the axis's size."""
        return Header.WORDS * AXES.index(name)

    @staticmethod
    def single(name: str) -> int:
        """Word that is 1 when the axis's size is 1, else 0."""
        return Header.axis(name) + 1

    @staticmethod
    def many(name: str) -> int:
        """Word that holds the axis's size when it is more than 1, else 0."""
        return Header.axis(name) + 2

    @staticmethod
    def matvec(name: str) -> int:
        """Word that is 1 when the axis's size is 1 to MATVEC_ROWS, else 0."""
        return Header.axis(name) + 3

    @staticmethod
    def tile(name: str) -> int:
        """Word that holds the axis's size when it is more than MATVEC_ROWS, else 0."""
        return Header.axis(name) + 4

    def set(self, sizes: Mapping[str, int]) -> None:
        """Takes over the live sizes, which from one step of decoding to the next are mostly the same."""
        if sizes == self._sizes:
            return
        self._sizes = sizes
        for name, size in sizes.items():
            above = [size if size > rows else 0 for rows in (1, MATVEC_ROWS)]
            at = self.axis(name)
            self.words[at : at + self.WORDS] = size, size == 1, above[0], 1 <= size <= MATVEC_ROWS, above[1]

    def new(self) -> int:
        """A word that some stage of the step computes."""
        self._used += 1
        return self._used - 1

    def address(self, word: int) -> int:
        return int(self.words.ctypes.data) + 8 * word


@dataclass(frozen=True)
class Slot:
    """A place in the arena, an address once the arena exists."""

    offset: int
    size: int


@dataclass(frozen=True)
class Live:
    """A header word, for a `live_` field."""

    word: int


Arg = int | float | Slot | Live


@dataclass(frozen=True)
class Job:
    """One kernel over its chunks: ceil(header[live] / every) * times of them."""

    kernel: KernelDef
    args: Mapping[str, Arg]
    live: int
    every: int = 1
    times: int = 1


@dataclass(frozen=True)
class Call:
    """Something that the host does between stages: `run` gets the live rows of values."""

    run: Callable[..., None]
    places: tuple[tuple[Arg, int, int], ...]
    """Where each value is, the header word of its rows and its width."""


class Arena:
    """Offsets for buffers with lifetimes: first fit, coalescing; the memory itself is made at the end."""

    ALIGN = 256

    def __init__(self) -> None:
        self.size = 0
        self._free: list[tuple[int, int]] = []

    def allocate(self, size: int) -> Slot:
        size = -(-max(size, 1) // self.ALIGN) * self.ALIGN
        for i, (start, length) in enumerate(self._free):
            if length >= size:
                self._free[i : i + 1] = [(start + size, length - size)] if length > size else []
                return Slot(start, size)
        slot = Slot(self.size, size)
        self.size += size
        return slot

    def free(self, slot: Slot) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (slot.offset, slot.size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


@dataclass
class Plan:
    """Collects stages while nodes are lowered one after another.

    `forms` says in which forms a value is read: "f32", "q" (rounded to 8 bits) or both.
    """

    level: Level
    threads: int
    sizes: Mapping[str, int]
    """Largest size of each free axis."""
    exact: bool
    """float32 arithmetic on dequantised values."""
    forms: Mapping[int, set[str]]
    last_use: Mapping[int, int]
    producer: Mapping[int, int]
    header: Header = field(default_factory=Header)
    arena: Arena = field(default_factory=Arena)
    keep: list[Any] = field(default_factory=list)
    stages: list[tuple[int, list[Job]]] = field(default_factory=list)
    calls: dict[int, Call] = field(default_factory=dict)
    """By the stage that each stands for."""
    node: int = 0
    _at: dict[tuple[int, str], Arg] = field(default_factory=dict)
    _temporary: list[Slot] = field(default_factory=list)

    def rows(self, value: Value) -> str:
        """The value's free first axis."""
        axis = value.dims[0]
        assert isinstance(axis, str), value
        return axis

    def width(self, value: Value) -> int:
        """Values of a row in all."""
        return math.prod(d for d in value.dims[1:] if isinstance(d, int))

    def row(self, value: Value) -> tuple[int, int]:
        """The last axis, and how often it repeats between it and the first."""
        k = value.dims[-1]
        assert isinstance(k, int), value
        return k, self.width(value) // k

    def bind(self, value: Value, address: int) -> None:
        """A value that lives in memory of its own, such as a step input."""
        self._at[value.id, "f32"] = address

    def place(self, value: Value, form: str = "f32") -> Arg:
        """The value's buffer, allocated on first use."""
        key = (value.id, form)
        if key not in self._at:
            if form == "q":
                k, between = self.row(value)
                each = row_bytes(k) * between
            else:
                each = (2 if form == "bf16" else 4) * self.width(value)
            # Vector loads may run past the last row, never past this margin.
            self._at[key] = self.arena.allocate(self.sizes[self.rows(value)] * each + 256)
        return self._at[key]

    def has(self, value: Value, form: str) -> bool:
        return (value.id, form) in self._at

    def temporary(self, size: int) -> Slot:
        """A buffer for the current node only."""
        slot = self.arena.allocate(size)
        self._temporary.append(slot)
        return slot

    def live(self, axis: str) -> Live:
        return Live(Header.axis(axis))

    def stage(self, *jobs: Job) -> None:
        """Jobs that may run at once, after every stage before."""
        self.stages.append((self.node, list(jobs)))

    def call(self, run: Callable[..., None], *values: Operand) -> None:
        """Runs on the host, after every stage before; gets the rows of the values."""
        found = [v for v in values if isinstance(v, Value)]
        places = tuple((self.place(v), Header.axis(self.rows(v)), self.width(v)) for v in found)
        self.calls[len(self.stages)] = Call(run, places)
        self.stages.append((self.node, []))

    def shared_stage(self, value: Value | None, job: Job) -> None:
        """A stage that later nodes rely on too: it runs whenever the value's producer does, or always without one."""
        producer = self.producer.get(value.id, -1) if value is not None else -1
        self.stages.append((producer, [job]))

    def end_value(self, value: Value) -> None:
        """Frees a value that no later node reads."""
        for form in ("f32", "q", "bf16"):
            slot = self._at.get((value.id, form))
            if isinstance(slot, Slot):
                self.arena.free(slot)
                del self._at[value.id, form]

    def end_node(self, values: Sequence[Value]) -> None:
        """Frees what was last read by the current node."""
        for slot in self._temporary:
            self.arena.free(slot)
        self._temporary.clear()
        for value in {v.id: v for v in values}.values():
            if self.last_use.get(value.id, -1) <= self.node:
                self.end_value(value)
        self.node += 1


Piece = tuple[tuple[int, ...], StageTable | Callable[[], None]]
"""Stages that run one after the other, and how."""


@dataclass(frozen=True)
class Tables:
    """Stage tables over one arena. The address of a job's kernel is 0 until `load` has been asked for it."""

    arena: np.ndarray
    header: Header
    jobs: np.ndarray
    missing: dict[str, tuple[KernelDef, list[int]]]
    """Kernels without an address, by name, and their jobs."""
    stages: tuple[tuple[int, int, int], ...]
    """(node, first job, jobs) of every stage."""
    kernels: tuple[str, ...]
    """The name of each stage's first kernel; empty for what the host does."""
    scratch: int
    keep: tuple[Any, ...]
    calls: Mapping[int, Call] = field(default_factory=dict)

    def wanted(self, pieces: Sequence[Piece]) -> dict[str, set[int]]:
        """The missing kernels of these pieces, and the header words that say how many chunks they have."""
        rows = {r for stages, _ in pieces for i in stages for r in range(self.stages[i][1], sum(self.stages[i][1:]))}
        found = {name: rows.intersection(jobs) for name, (_, jobs) in list(self.missing.items())}
        return {name: {int(self.jobs[r, 2]) for r in some} for name, some in found.items() if some}

    def used(self, wanted: Mapping[str, set[int]]) -> list[str]:
        """Of missing kernels those that the step ahead may call: the sizes of its axes are known, other counts are not."""
        words = self.header.words
        return [
            name
            for name, counts in wanted.items()
            if name in self.missing and any(word >= Header.ONE or words[word] for word in counts)
        ]

    def load(self, names: Sequence[str], level: Level, threads: int = 1) -> None:
        """Compiles these kernels, or takes them from the cache, and writes their addresses."""
        found = [(name, *entry) for name in names if (entry := self.missing.get(name)) is not None]
        addresses = jit.addresses([kernel.function for _, kernel, _ in found], level, threads)
        for (name, _, jobs), address in zip(found, addresses, strict=True):
            self.jobs[jobs, 0] = address  # another thread may run a step: it looks at what is missing first
            self.missing.pop(name, None)

    def load_cached(self, level: Level) -> None:
        """Loads what need not be compiled."""
        found = list(self.missing.items())
        self.load([name for name, (kernel, _) in found if jit.is_cached(kernel.function, level)], level)

    def select(self, nodes: set[int]) -> list[Piece]:
        """The stages of some nodes only, in as many pieces as the host's calls between them make necessary."""
        pieces: list[Piece] = []
        chosen = [i for i, (node, *_) in enumerate(self.stages) if node < 0 or node in nodes]
        for host, some in groupby(chosen, lambda i: i in self.calls):
            stages = tuple(some)
            if host:
                pieces += [((i,), partial(self._call, self.calls[i])) for i in stages]
            else:
                rows = np.array([self.stages[i][1:] for i in stages], np.int64)
                pieces.append((stages, StageTable(rows, self.jobs, self.header.words, self.scratch, (self,))))
        return pieces

    def _call(self, call: Call) -> None:
        call.run(*(self._live(*place) for place in call.places))

    def _live(self, place: Arg, word: int, width: int) -> Rows:
        rows = int(self.header.words[word])
        if isinstance(place, Slot):
            return self.view(place, np.float32, (rows, width))
        assert isinstance(place, int)
        return np.ctypeslib.as_array((ctypes.c_float * (rows * width)).from_address(place)).reshape(rows, width)

    def view(self, slot: Arg, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """A buffer of the arena as an array."""
        assert isinstance(slot, Slot)
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.arena[slot.offset : slot.offset + count].view(dtype).reshape(shape)


def finish(plan: Plan) -> Tables:
    """Makes the arena and writes the tables. No kernel is compiled yet."""
    arena = aligned(plan.arena.size + 4096)
    base = int(arena.ctypes.data)

    def resolved(arg: Arg) -> int | float:
        if isinstance(arg, Slot):
            return base + arg.offset
        return plan.header.address(arg.word) if isinstance(arg, Live) else arg

    rows, stages, blocks, scratch = [], [], [], 4096
    missing: dict[str, tuple[KernelDef, list[int]]] = {}
    for node, jobs in plan.stages:
        stages.append((node, len(rows), len(jobs)))
        for job in jobs:
            block = job.kernel.pack({name: resolved(arg) for name, arg in job.args.items()})
            blocks.append(block)
            scratch = max(scratch, job.kernel.scratch)
            missing.setdefault(job.kernel.name, (job.kernel, []))[1].append(len(rows))
            rows.append((0, block.ctypes.data, job.live, job.every, job.times))
    table = np.array(rows, np.int64).reshape(-1, 5)
    kernels = tuple(jobs[0].kernel.name if jobs else "" for _, jobs in plan.stages)
    keep = (*plan.keep, *blocks)
    return Tables(arena, plan.header, table, missing, tuple(stages), kernels, scratch, keep, dict(plan.calls))
