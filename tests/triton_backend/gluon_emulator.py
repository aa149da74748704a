"""Runs a Gluon kernel's own text on the CPU, one program at a time: its arithmetic on tensors, TMA copies, barriers, warps.

Layouts say which lane holds what and are ignored. All else is checked: addresses (nothing is read or written outside of a
tensor, and copies begin where TMA lets them), the order of columns, bytes that barriers expect, phases, and who waits for
whom. A copy is done as late as it can be, when somebody waits for it; from its request until then its place holds NaN. The
producer runs ahead whenever it can. A wait that nobody will end raises `Deadlock`. An asynchronous product reads shared
memory as late as it can, when somebody waits for it. Nothing is copied over what the consumer's warps have read since they
last met, as one of them may be behind. Inline assembly runs as it is written (`ptx_emulator.py`).
"""

from __future__ import annotations

import builtins
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.triton_backend import ptx_emulator


class Deadlock(AssertionError):
    """A partition waits for what no other will do."""


class Type:
    """An element type, as kernels name it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.primitive_bitwidth = dtype, dtype.itemsize * 8

    @property
    def element_ty(self) -> Type:
        return self


class Value(torch.Tensor):
    """A block of values, or one."""

    def to(self, type: Any, bitcast: bool = False) -> Value:  # type: ignore[override]
        if bitcast:
            return torch.Tensor.view(self, type.dtype).as_subclass(Value)
        return torch.Tensor.to(self, type.dtype if isinstance(type, Type) else type).as_subclass(Value)


def value(x: Any, dtype: torch.dtype | None = None) -> Value:
    if isinstance(x, Value) and dtype is None:
        return x
    return torch.as_tensor(x, dtype=dtype).as_subclass(Value)


@dataclass(frozen=True)
class Pointer:
    """Addresses in a flat tensor."""

    tensor: torch.Tensor
    at: Any = 0

    @property
    def dtype(self) -> Type:
        return Type(self.tensor.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.at + more)


def pointer(x: torch.Tensor) -> Pointer:
    return Pointer(x.view(-1))


def load(p: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Value:
    at = value(p.at).long()
    ok = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.broadcast_to(value(mask), at.shape)
    assert bool(((at >= 0) & (at < p.tensor.numel()))[ok].all()), "a load outside of its tensor"
    found = p.tensor[torch.where(ok, at, 0)]
    return value(torch.where(ok, found, torch.as_tensor(other, dtype=found.dtype)))


def store(p: Pointer, x: Any, mask: Any = None) -> None:
    at = value(p.at).long()
    x = torch.broadcast_to(value(x).to(p.tensor.dtype), at.shape)
    ok = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.broadcast_to(value(mask), at.shape)
    assert bool(((at >= 0) & (at < p.tensor.numel()))[ok].all()), "a store outside of its tensor"
    p.tensor[at[ok]] = x[ok]


@dataclass
class Shared:
    """A part of shared memory."""

    data: torch.Tensor
    dtype: Type
    read: list[torch.Tensor] = field(default_factory=list)
    """What was read since the last barrier, of all shared memory."""

    def index(self, i: Any) -> Any:
        assert 0 <= int(i) < len(self.data), f"place {int(i)} of {len(self.data)}"
        found = self.data[int(i)]
        return Shared(found, self.dtype, self.read) if isinstance(found, torch.Tensor) else found

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, int(start), length), self.dtype, self.read)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order), self.dtype, self.read)

    def load(self, layout: Any) -> Value:
        self.read.append(self.data)
        return value(self.data.clone())

    def store(self, x: torch.Tensor) -> None:
        assert self.data.shape == x.shape, (self.data.shape, x.shape)
        self.data.copy_(x)

    def view(self, dtype: Type, shape: list[int], layout: Any) -> Shared:
        """The first bytes of it as something else."""
        count = torch.Size(shape).numel()
        flat = self.data.reshape(-1)
        assert flat.data_ptr() == self.data.data_ptr(), "not in one piece"
        assert count * dtype.dtype.itemsize <= flat.numel() * flat.element_size(), "outgrows what it lies in"
        return Shared(flat.view(torch.uint8).view(dtype.dtype)[:count].view(shape), dtype, self.read)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two pieces of memory share a byte."""
    first, second = ((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (a, b))
    return first[0] < second[1] and second[0] < first[1]


@dataclass
class Barrier:
    """An mbarrier: it ends a phase when `count` have arrived and every byte that is expected has come."""

    count: int = 0
    missing: int = 0
    bytes: int = 0
    phase: int = 0
    copies: list[Callable[[], int]] = field(default_factory=list)

    def settle(self) -> None:
        assert self.missing >= 0, "more arrivals than the barrier counts"
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def ready(self, parity: int) -> bool:
        return self.phase % 2 != int(parity)


class Barriers:
    """An array of them in shared memory."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


class Copies:
    """A TMA descriptor `[rows, columns]` in boxes; `asked` is every row that was read."""

    def __init__(self, descriptor: Any) -> None:
        self.tensor, self.box, self.dtype = descriptor.base, tuple(descriptor.block_shape), Type(descriptor.base.dtype)
        self.asked: set[int] = set()
        self.layout = None
        each = self.tensor.element_size()
        for what, count in (
            ("a base", self.tensor.data_ptr()), ("a row", self.tensor.stride(0) * each), ("a box's row", self.box[1] * each)
        ):  # fmt: skip
            assert count % 16 == 0, f"{what} of a copy is at, or of, {count} bytes, no multiple of 16"
        self.align = max(128, 8 * descriptor.layout.swizzle_byte_width)
        """Where its boxes may begin in shared memory; swizzled ones where their pattern does."""


class Machine:
    """One program. Two partitions take turns: one runs until it waits for the other, or has given it something to do."""

    def __init__(self) -> None:
        self._turn = 0
        self._changed = threading.Condition()
        self._waits: list[tuple[Barrier, int] | None] = [None, None]
        self._done = [True, True]
        self._raised: list[BaseException] = []
        self._who = threading.local()
        self.read: list[torch.Tensor] = []
        self._products: list[Callable[[], None]] = []

    def _switch(self, me: int) -> None:
        with self._changed:
            self._turn = 1 - me
            self._changed.notify_all()
            while self._turn != me:
                self._changed.wait()
        if me == 0 and self._raised:
            raise self._raised[0]

    def _can_go(self, who: int) -> bool:
        waits = self._waits[who]
        return not self._done[who] and (waits is None or waits[0].ready(waits[1]))

    def specialize(self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
        (consume, given), (produce, more) = parts
        self._done = [False, False]

        def worker() -> None:
            self._who.me = 1
            with self._changed:
                while self._turn != 1:
                    self._changed.wait()
            try:
                produce(*more)
            except BaseException as problem:
                self._raised.append(problem)
            self._done[1] = True
            with self._changed:
                self._turn = 0
                self._changed.notify_all()

        thread = threading.Thread(target=worker, daemon=True)
        thread.start()
        self._who.me = 0
        self._switch(0)
        consume(*given)
        self._done[0] = True
        if not self._done[1]:
            self._switch(0)
        thread.join()
        if self._raised:
            raise self._raised[0]

    def init(self, bar: Barrier, count: int) -> None:
        bar.count = bar.missing = count

    def expect(self, bar: Barrier, bytes: int) -> None:
        bar.bytes += bytes
        bar.missing -= 1
        bar.settle()

    def arrive(self, bar: Barrier, count: int, pred: Any = True) -> None:
        if not pred:
            return
        bar.missing -= count
        bar.settle()
        me = self._who.me
        if self._can_go(1 - me):
            self._switch(me)

    def wait(self, bar: Barrier, parity: int) -> None:
        me = self._who.me
        while True:
            for copy in bar.copies:
                bar.bytes -= copy()
            if bar.copies:
                bar.copies.clear()
                bar.settle()
            if bar.ready(parity):
                self._waits[me] = None
                return
            self._waits[me] = (bar, int(parity))
            if not self._can_go(1 - me):
                raise Deadlock(f"partition {me} waits for a phase of parity {int(parity)} that nobody ends")
            self._switch(me)

    def copy(self, source: Copies, where: list[Any], bar: Barrier, to: Shared) -> None:
        row, column = (int(x) for x in where)
        assert tuple(to.data.shape) == source.box, (to.data.shape, source.box)
        # What is allocated begins at a multiple of 1024.
        at = to.data.storage_offset() * to.data.element_size()
        assert at % source.align == 0, f"a copy to byte {at} of shared memory, no multiple of {source.align}"
        assert column * to.data.element_size() % 16 == 0, f"a copy from column {column}, no multiple of 16 bytes"
        assert not any(overlap(to.data, x) for x in self.read), "a copy to what a warp may still read: no barrier since"
        bytes_of = to.data.view(torch.uint8) if to.data.is_contiguous() else to.data
        bytes_of.fill_(255)

        def do() -> int:
            to.data.zero_()
            rows, columns = (
                range(max(first, 0), min(first + box, size))
                for first, box, size in zip((row, column), source.box, source.tensor.shape, strict=True)
            )
            if rows and columns:  # what is outside of the tensor comes as zeros
                found = source.tensor[rows.start : rows.stop, columns.start : columns.stop]
                to.data[rows.start - row : rows.stop - row, columns.start - column : columns.stop - column] = found
                source.asked.update(rows)
            return to.data.numel() * to.data.element_size()

        bar.copies.append(do)

    def barrier(self) -> None:
        """All warps of a partition meet."""
        self.read.clear()

    def multiply(self, w: Value, x: Shared, acc: Value, use_acc: Any = True, is_async: bool = False) -> Value:
        """`wgmma`: its result is NaN until somebody waits for it."""
        assert x.data.dtype == w.dtype
        found = value(torch.full_like(acc, torch.nan))

        def do() -> None:
            product = w.float() @ x.data.float()
            found.copy_(acc + product if use_acc else product)
            x.read.append(x.data)

        self._products.append(do)
        return found if is_async else self.wait_products(0, [found])

    def wait_products(self, most: int, deps: list[Value]) -> Value:
        """Until so many are under way."""
        while len(self._products) > most:
            self._products.pop(0)()
        return deps[0]


def language(machine: Machine, ids: tuple[int, ...], grid: tuple[int, ...]) -> dict[str, Any]:
    """What stands for `gl`, `tl` and the rest in the globals of kernels."""

    def both(f: Callable[..., Any]) -> Callable[[Any, Any], Value]:
        def of(a: Any, b: Any, propagate_nan: Any = None) -> Value:
            wide = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), torch.int32)
            return value(f(*(x if isinstance(x, torch.Tensor) else torch.as_tensor(x, dtype=wide) for x in (a, b))))

        return of

    def zeros(shape: list[int], dtype: Type, layout: Any = None) -> Value:
        return value(torch.zeros(shape, dtype=dtype.dtype))

    def allocate(dtype: Type, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            return Barriers(shape[0])
        data = torch.empty(shape, dtype=dtype.dtype)
        data.view(torch.uint8).fill_(255)
        return Shared(data, dtype, machine.read)

    def where(condition: Any, a: Any, b: Any) -> Any:
        if isinstance(a, Pointer):
            return a if condition else b
        return value(torch.where(value(condition), a, b))

    def counted(*ends: Any) -> Iterator[Value]:
        return (value(i, torch.int32) for i in range(*map(int, ends)))

    names = {n: Type(getattr(torch, n)) for n in ("int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")}
    layouts = {n: lambda *_, **__: None for n in (
        "BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMASharedLayout", "SwizzledSharedLayout",
        "NVMMADistributedLayout", "DistributedLinearLayout",
    )}  # fmt: skip
    gl = SimpleNamespace(
        **names, **layouts, constexpr=lambda x: x, static_range=range, program_id=lambda i: value(ids[i], torch.int32),
        load=load, store=store, arange=lambda a, b, layout=None: value(torch.arange(a, b, dtype=torch.int32)),
        where=where, maximum=both(torch.maximum), minimum=both(torch.minimum), zeros=zeros,
        zeros_like=lambda x: value(torch.zeros_like(x)), max=lambda x, axis: value(x.amax(axis)),
        sum=lambda x, axis: value(x.sum(axis, dtype=x.dtype)), exp2=lambda x: value(torch.exp2(x)),
        exp=lambda x: value(torch.exp(x)), abs=lambda x: value(torch.abs(x)), floor=lambda x: value(torch.floor(x)),
        expand_dims=lambda x, axis: value(x.unsqueeze(axis)),
        permute=lambda x, order: value(x.permute(order)), reshape=lambda x, shape: value(x.reshape(shape)),
        convert_layout=lambda x, layout, assert_trivial=False: x, join=lambda a, b: value(torch.stack([a, b], -1)),
        broadcast_to=lambda x, shape: value(torch.broadcast_to(x, shape)), fma=lambda a, b, c: value(a * b + c),
        allocate_shared_memory=allocate, warp_specialize=machine.specialize, static_assert=_must,
        num_programs=lambda i: grid[i], split=lambda x: tuple(value(v.clone()) for v in x.unbind(-1)),
        inline_asm_elementwise=inline, PropagateNan=SimpleNamespace(ALL=None),
    )  # fmt: skip
    barrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=machine.init, expect=machine.expect, arrive=machine.arrive,
        wait=machine.wait,
    )  # fmt: skip
    return {
        "gl": gl, "tl": gl, "range": counted, "mbarrier": barrier, "_copy": machine.copy, "_barrier": machine.barrier,
        "_view": Shared.view, "mma_v2": lambda a, b, acc: value(a.float() @ b.float() + acc), "gdc_wait": lambda: None,
        "gdc_launch_dependents": lambda: None, "warpgroup_mma": machine.multiply,
        "warpgroup_mma_wait": machine.wait_products, "warpgroup_mma_init": lambda x: x,
    }  # fmt: skip


def inline(assembly: str, constraints: str, args: list[Value], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Inline assembly, on elements of 32 bits."""
    given = torch.broadcast_tensors(*args)
    words = [x.contiguous().numpy().reshape(-1).view(np.uint32) for x in given]
    found = ptx_emulator.run(assembly, constraints, words)
    made = []
    for x, kind in zip(found, dtype if isinstance(dtype, tuple) else (dtype,), strict=True):
        to = kind.dtype if isinstance(kind, Type) else {"fp16": torch.float16}[kind.name]
        bits = torch.from_numpy(x.view(np.int32).copy()).to(torch.int16 if to.itemsize == 2 else torch.int32)
        made.append(value(bits.view(to).view(given[0].shape)))
    return tuple(made) if isinstance(dtype, tuple) else made[0]


def _must(holds: bool, text: str) -> None:
    assert holds, text


def plain(kernel: Any, given: dict[str, Any], made: dict[int, Any]) -> Any:
    """A kernel's function, or one that it calls, over these names; constants as their values, layouts as nothing."""
    function = getattr(kernel, "fn", kernel)
    if id(function) in made:
        return made[id(function)]
    around: dict[str, Any] = {"__builtins__": builtins}
    made[id(function)] = run = types.FunctionType(function.__code__, around, function.__name__, function.__defaults__)
    for name in _names(function.__code__):
        if name in given:
            around[name] = given[name]
        elif name in function.__globals__:
            around[name] = _known(function.__globals__[name], given, made)
    return run


def _known(found: Any, given: dict[str, Any], made: dict[int, Any]) -> Any:
    """What a kernel finds under a name: functions for functions, also those in modules and in records of the package."""
    kind = type(found)
    if kind.__name__ == "constexpr":
        return found.value
    if kind.__name__ == "ConstexprFunction":
        return lambda *args: _known(found(*args), given, made)
    if hasattr(found, "__triton_aggregate__"):
        return partial(_record, plain(found.hash_attrs[0], given, made))
    if hasattr(found, "fn"):
        return plain(found, given, made)
    return Within(found, given, made) if isinstance(found, types.ModuleType) or "quarrel." in kind.__module__ else found


def _record(init: Callable[..., None], *args: Any) -> SimpleNamespace:
    made = SimpleNamespace()
    init(made, *args)
    return made


class Within:
    """A module or a record, and its kernels as plain functions."""

    def __init__(self, of: Any, given: dict[str, Any], made: dict[int, Any]) -> None:
        self._all = of, given, made

    def __getattr__(self, name: str) -> Any:
        of, given, made = self._all
        return _known(getattr(of, name), given, made)


def _names(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def given(x: Any, copies: dict[int, Copies]) -> Any:
    """An argument of a launch as `run` takes it; `copies` keeps one of each descriptor."""
    if isinstance(x, torch.Tensor):
        return pointer(x)
    if hasattr(x, "block_shape"):
        return copies.setdefault(id(x), Copies(x))
    if isinstance(x, tuple):
        parts = [given(part, copies) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return Type(getattr(torch, {"fp16": "float16"}[x.name])) if hasattr(x, "primitive_bitwidth") else x


def run(kernel: Any, grid: tuple[int, ...], named: dict[str, Any], instead: dict[str, Any]) -> None:
    """Every program of a launch. `instead` stands for names of the kernel's globals: what is written in assembly."""
    for i in range(grid[0]):
        for j in range(*grid[1:] or (1,)):
            machine = Machine()
            names = language(machine, (i, j), grid) | instead
            plain(kernel, names, {})(**named)
