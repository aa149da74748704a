"""Weights as kernels read them: packed rows in place in the file's mapping, and small vectors as float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quarrel.cpu_backend.formats.dequantize import FLOATS
from quarrel.cpu_backend.formats.table import BLOCKS
from quarrel.gguf import GGMLType
from quarrel.ops.contract import Array, Compute, WeightRef
from quarrel.ops.step import WeightSource
from quarrel.ops.weights import PackedWeights, stored_type


@dataclass(frozen=True)
class Packed:
    """Rows of a native type, in the file's mapping unless they had to be converted."""

    type: str
    data: Array  # uint8 [rows, row_bytes]
    k: int

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    @property
    def rows(self) -> int:
        return len(self.data)

    @property
    def row_bytes(self) -> int:
        return int(self.data.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


NATIVE = frozenset(GGMLType[name] for name in (*BLOCKS, *FLOATS))
"""The formats that kernels read as they are."""


class Weights(PackedWeights[Packed, Array]):
    """See `ops.weights.PackedWeights`; native formats are not even copied."""

    def __init__(self, source: WeightSource, compute: Compute) -> None:
        super().__init__(source, NATIVE, compute)

    def stored_as(self, type: GGMLType) -> str:
        """The format in which kernels see weights of this one."""
        return stored_type(type, NATIVE, self._compute).name

    def dense(self, ref: WeightRef) -> Array:
        """float32 `[rows, k]`, for what is rearranged before use."""
        return self._source.raw(ref).dense()

    def in_place(self) -> int:
        """Bytes in the file's own pages."""
        return sum(packed.nbytes for ref, packed in self._packed.items() if ref.type in NATIVE)

    def _pack(self, type: GGMLType, rows: int, k: int, read: Callable[[int, int], Array]) -> Packed:
        return Packed(type.name, np.ascontiguousarray(read(0, rows)), k)

    def _upload(self, values: Array) -> Array:
        # Kernels may load whole vectors of sixteen at the end.
        return np.concatenate([values.astype(np.float32), np.zeros(16, np.float32)])
