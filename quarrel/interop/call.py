"""One op of the contract, built once for the weights that it has, and run on tensors that are there.

Building takes longer than launching, so what is built for a weight stays with it, for as long as somebody holds that weight
(`kept`). Nothing of a call stays: results and what lies between are fresh memory, as PyTorch's own operators take it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from quarrel.gguf import GGMLType
from quarrel.ops.contract import CacheRef, Compute, ConstRef, Op, Operand, StateRef, Value, WeightRef
from quarrel.ops.program import Node, Program
from quarrel.ops.registry import lower
from quarrel.triton_backend.backend import REGISTRY
from quarrel.triton_backend.runtime.arrays import DTYPES, E4M3, Cache, Packed, Slot
from quarrel.triton_backend.runtime.buffers import dtype_of
from quarrel.triton_backend.runtime.launch import INTERPRETED, Grid, Launcher, launch
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, Tables

COMPUTE: dict[torch.dtype, Compute] = {dtype: compute for compute, dtype in DTYPES.items()}
_NONE = Batch(0, 0, 0, False, False, 0)
_MOST = 8
"""Ways in which one weight is used: types of activations, biases."""


class _Later(Slot):
    """Memory that is only taken when a launch asks for it."""

    def __init__(self, size: Callable[[], int], dtype: torch.dtype, device: torch.device, zero: bool) -> None:
        self._how = (size, dtype, device, zero)
        self._made: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        if self._made is None:
            size, dtype, device, zero = self._how
            self._made = (torch.zeros if zero else torch.empty)(size(), dtype=dtype, device=device)
        return self._made

    def drop(self) -> None:
        self._made = None


@dataclass
class Prepared(Site):
    """What a launcher asks while it is built (`triton_backend.runtime.site`), and then the built op.

    `bound` are its weights, vectors and caches in the contract's order, with None for what comes with each call.
    """

    op: Op
    spec: Any
    bound: Sequence[torch.Tensor | Packed | Cache | None]
    compute: Compute
    device: torch.device
    deterministic: bool = False
    float8: bool = False
    cudnn_from: int = 0
    launcher: Launcher = launch
    group: None = None
    batch: Batch = _NONE
    tables: Tables = field(init=False)
    generation: int = field(init=False)

    def __post_init__(self) -> None:
        self.generation = 0 if INTERPRETED else torch.cuda.get_device_capability(self.device)[0]
        nothing = self._nothing = torch.empty(0, device=self.device)
        self.tables = self._no_tables = Tables(Slot(nothing), Slot(nothing))
        self._lock = Lock()
        self._begun = False
        self._slots: dict[int, Slot] = {}
        self._weights: dict[WeightRef, Packed] = {}
        self._e4m3: dict[tuple[int, ...], E4M3] = {}
        self._vectors: dict[WeightRef, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._caches: list[Cache] = []
        self._later: list[_Later] = []
        self._given: list[Slot] = []
        params = zip(self.op.params(self.spec), self.bound, strict=True)
        operands = [self._operand(i, param, bound) for i, (param, bound) in enumerate(params)]
        self.bound = ()
        start = len(operands)
        results = [Value(i, r.kind, r.dims(self.spec), r.name) for i, r in enumerate(self.op.results(self.spec), start)]
        node = Node(self.op, self.spec, tuple(operands), tuple(results), self.op.name)
        self._made: list[tuple[Slot, int, tuple[str, ...], torch.dtype]] = []
        self._launches: list[Launch] = []
        for choice in lower(Program((node,), {}, {}, ()), REGISTRY):
            for value in choice.node.outputs:
                self._make(value)
            self._launches.append(choice.implementation.build(self, choice.node))
        self._results = [self._slots[value.id] for value in results]

    def __call__(self, arrays: Sequence[torch.Tensor], batch: Batch, tables: Tables | None = None) -> list[torch.Tensor]:
        """The op's results, flat tensors of the contract's types; `arrays` are what `bound` has not, contiguous."""
        with self._lock, on(self.device):
            self.batch, self._begun = batch, False
            if tables is not None:
                self.tables = tables
            try:
                for slot, array in zip(self._given, arrays, strict=True):
                    slot.tensor = array.view(-1)
                for buffer, source in self._copies:
                    buffer.copy_(source)
                for slot, size, axes, dtype in self._made:
                    for axis in axes:
                        size *= batch.count(axis)
                    slot.tensor = torch.empty(size, dtype=dtype, device=self.device)
                for go in self._launches:
                    go(batch)
                return [slot.tensor for slot in self._results]
            finally:
                self.tables = self._no_tables
                for slot in self._given:
                    slot.tensor = self._nothing
                for slot, *_ in self._made:
                    slot.tensor = self._nothing
                for later in self._later:
                    later.drop()

    def drop(self) -> None:
        """Lets go of what was built: launches refer to this, and would wait for a garbage collection."""
        self._launches.clear()

    def _operand(self, i: int, param: Any, bound: torch.Tensor | Packed | Cache | None) -> Operand:
        if isinstance(bound, Packed):
            ref = WeightRef(f"{i}", GGMLType[bound.format], bound.n, bound.k)
            self._weights[ref] = bound
            return ref
        if isinstance(bound, Cache):
            self._caches.append(bound)
            return CacheRef(len(self._caches) - 1)
        if bound is not None:
            ref = WeightRef(f"{i}", GGMLType.F32, 1, bound.numel())
            self._vectors[ref] = self._float(bound)
            return ref
        self._given.append(Slot(self._nothing))
        self._slots[i] = self._given[-1]
        return Value(i, param.kind, param.dims(self.spec), param.name)

    def _float(self, vector: torch.Tensor) -> torch.Tensor:
        if vector.dtype == torch.float32 and vector.is_contiguous():
            return alias(vector).view(-1)
        # What it holds may change, so it is read again at each call.
        buffer = torch.empty(vector.shape, dtype=torch.float32, device=vector.device)
        self._copies.append((buffer, alias(vector)))
        return buffer.view(-1)

    def _make(self, value: Value) -> None:
        if value.id in self._slots:
            return
        size = 1
        for d in value.dims:
            size *= 1 if isinstance(d, str) else d
        axes = tuple(d for d in value.dims if isinstance(d, str))
        slot = self._slots[value.id] = Slot(self._nothing)
        self._made.append((slot, size, axes, dtype_of(value.kind, DTYPES[self.compute])))

    def launch(self, kernel: Any, grid: Grid, *args: Any, early: bool | None = None, **options: Any) -> None:
        """Kernels that start early read weights and tables before they wait, which in a step are older than its first
        kernel. Here they may be the work of whatever ran last, so the first kernel of a call starts when that is over."""
        self.launcher(kernel, grid, *args, early=early and self._begun, **options)
        self._begun = self._begun or all(grid)

    # What a launcher asks while it is built.

    def slot(self, value: Value) -> Slot:
        return self._slots[value.id]

    def weight(self, ref: WeightRef) -> Packed:
        return self._weights[ref]

    def e4m3(self, weights: Sequence[Packed]) -> E4M3:
        key = tuple(map(id, weights))
        return self._e4m3.setdefault(key, E4M3(weights))

    def vector(self, ref: WeightRef) -> torch.Tensor:
        return self._vectors[ref]

    def cache(self, ref: CacheRef) -> Cache:
        return self._caches[ref.layer]

    def const(self, ref: ConstRef) -> torch.Tensor:
        return torch.tensor(ref.data, dtype=torch.float32, device=self.device)

    def state(self, ref: StateRef) -> torch.Tensor:
        raise AssertionError("no op here keeps a state")

    def scratch(self, dim: str, width: int, dtype: torch.dtype = torch.float32) -> Slot:
        return self._wanted(dim, width, dtype, zero=False)

    def zeros(self, dim: str, width: int) -> Slot:
        return self._wanted(dim, width, torch.int32, zero=True)

    def counter(self, path: str, width: int) -> torch.Tensor:
        return torch.zeros(width, dtype=torch.int64, device=self.device)

    def _wanted(self, dim: str, width: int, dtype: torch.dtype, zero: bool) -> Slot:
        def size() -> int:
            counts = {"one": 1, "items": self.batch.items}
            return (counts[dim] if dim in counts else self.batch.count(dim)) * width

        self._later.append(_Later(size, dtype, self.device, zero))
        return self._later[-1]


class _Made:
    """Of one tensor: where its data was, and what was built for it."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.by_use: dict[Hashable, Prepared] = {}

    def __del__(self) -> None:
        for built in self.by_use.values():
            built.drop()


_MADE = WeakTensorKeyDictionary()
"""Remembers what would be built again the same; entries go with their tensor."""


def kept(anchor: torch.Tensor, use: Hashable, make: Callable[[], Prepared]) -> Prepared:
    """What `make` gave for this tensor and use before, if the tensor's data is where it was.

    What is made may hold its data (`alias`), never the tensor itself; `use` names the addresses of all else that it holds.
    """
    made = _MADE.get(anchor)
    if made is None or made.at != anchor.data_ptr():
        if made is not None:
            made.by_use = {}  # another thread may be using them
        made = _MADE[anchor] = _Made(anchor.data_ptr())
    found: Prepared | None = made.by_use.get(use)
    if found is None:
        if len(made.by_use) >= _MOST:
            made.by_use = {}
        found = made.by_use[use] = make()
    return found


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on the same memory, which does not keep this one."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels start on the current device, which need not be that of the tensors."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
