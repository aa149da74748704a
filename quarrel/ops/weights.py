"""What every backend that keeps copies of the weights needs to know of them, before and while it loads."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

import numpy as np

from quarrel.gguf import FORMATS, GGMLType, quantize
from quarrel.ops.contract import Array, Compute, ConstRef, RawWeight, WeightRef
from quarrel.ops.program import Node
from quarrel.ops.step import WeightSource

log = logging.getLogger("quarrel")


class _Sized(Protocol):
    @property
    def nbytes(self) -> int:
        """Bytes on the device."""


Packed = TypeVar("Packed", bound=_Sized)
Vector = TypeVar("Vector", bound=_Sized)


def weights_of(nodes: Iterable[Node]) -> list[WeightRef]:
    """Every weight, once, in order of use."""
    return list(dict.fromkeys(ref for node in nodes for ref in node.inputs if isinstance(ref, WeightRef)))


def file_bytes(ref: WeightRef) -> int:
    """Bytes of the rows in the file."""
    block = FORMATS[ref.type]
    return ref.rows * (ref.k // block.elements) * block.nbytes


def rows_as(source: WeightSource, ref: WeightRef, target: GGMLType) -> Callable[[int, int], Array]:
    """Gives rows `start` to `stop` of a weight as raw blocks of `target`, which is its own type or a float one."""
    raw = source.raw(ref)

    def read(start: int, stop: int) -> Array:
        rows = RawWeight(raw.type, raw.raw[start:stop], raw.k)
        return rows.raw if raw.type == target else quantize(rows.dense(), target)

    return read


class CallWeights:
    """The source of the weights that came with one call, by name."""

    def __init__(self, weights: Mapping[str, RawWeight]) -> None:
        self._weights = weights

    def raw(self, ref: WeightRef) -> RawWeight:
        return self._weights[ref.name]


class Loading:
    """How many bytes of the file are loaded; `progress` is called with those done and those in all."""

    def __init__(self, refs: Iterable[WeightRef], progress: Callable[[int, int], None] | None) -> None:
        self._waiting, self._progress = set(refs), progress
        self._whole, self._done = sum(map(file_bytes, self._waiting)), 0

    def loaded(self, ref: WeightRef) -> None:
        """Counts this weight; only the first time counts."""
        if ref in self._waiting:
            self._waiting.remove(ref)
            self._done += file_bytes(ref)
            if self._progress is not None:
                self._progress(self._done, self._whole)


def stored_type(type: GGMLType, native: Container[GGMLType], compute: Compute) -> GGMLType:
    """Its own format if kernels read it, else the float type that the reference's values are rounded to."""
    if type in native:
        return type
    return GGMLType.F32 if compute == "float32" else GGMLType.F16


class PackedWeights(ABC, Generic[Packed, Vector]):
    """The weights of a program on its device: matrices in a backend's own layout, vectors and tables as float32.

    Each is packed on first use and kept. `native` are the formats that kernels read; any other is dequantised. `progress`
    is called with the bytes of the file done and in all.
    """

    def __init__(
        self,
        source: WeightSource,
        native: Container[GGMLType],
        compute: Compute,
        refs: Iterable[WeightRef] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source, self._native, self._compute = source, native, compute
        self._loading = Loading(refs, progress)
        self._packed: dict[WeightRef, Packed] = {}
        self._vectors: dict[WeightRef, Vector] = {}
        self._consts: dict[tuple[float, ...], Vector] = {}

    @abstractmethod
    def _pack(self, type: GGMLType, rows: int, k: int, read: Callable[[int, int], Array]) -> Packed:
        """A matrix `[rows, k]`; `read(start, stop)` gives raw rows of `type`."""

    @abstractmethod
    def _upload(self, values: Array) -> Vector:
        """float32 `[n]`, a copy of `values`."""

    def finish(self) -> None:
        """Logs which types had to be dequantised."""
        foreign = sorted({r.type.name for r in self._packed if r.type not in self._native})
        if foreign:
            target = stored_type(GGMLType.IQ1_S, self._native, self._compute).name
            log.warning("%s tensors are dequantised to %s at load: no kernel reads them", ", ".join(foreign), target)

    def matrix(self, ref: WeightRef) -> Packed:
        if ref not in self._packed:
            target = stored_type(ref.type, self._native, self._compute)
            self._packed[ref] = self._pack(target, ref.rows, ref.k, rows_as(self._source, ref, target))
            self._loading.loaded(ref)
        return self._packed[ref]

    def vector(self, ref: WeightRef) -> Vector:
        if ref not in self._vectors:
            self._vectors[ref] = self._upload(self._source.raw(ref).dense().reshape(-1))
            self._loading.loaded(ref)
        return self._vectors[ref]

    def const(self, ref: ConstRef) -> Vector:
        if ref.data not in self._consts:
            self._consts[ref.data] = self._upload(np.array(ref.data, np.float32))
        return self._consts[ref.data]

    def nbytes(self) -> int:
        """Device bytes of all that is packed."""
        vectors = (*self._vectors.values(), *self._consts.values())
        return sum(p.nbytes for p in self._packed.values()) + sum(v.nbytes for v in vectors)
