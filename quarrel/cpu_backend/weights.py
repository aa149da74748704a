"""Weights as kernels read them: packed rows in place in the file's mapping, and small vectors as float32."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from quarrel.cpu_backend.dequant import FLOATS
from quarrel.cpu_backend.formats import BLOCKS
from quarrel.gguf import GGMLType
from quarrel.ops.contract import WeightRef
from quarrel.ops.step import WeightSource

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packed:
    """Rows of a native type at an address."""

    type: str
    address: int
    row_bytes: int
    rows: int
    k: int


def native(type: GGMLType) -> bool:
    """Whether kernels read this type as it is."""
    return type.name in BLOCKS or type.name in FLOATS


class Weights:
    """Loads each tensor once; whatever is not native is dequantised, float16 unless results must be exact."""

    def __init__(self, source: WeightSource, exact: bool) -> None:
        self._source, self._exact = source, exact
        self._packed: dict[WeightRef, Packed] = {}
        self._vectors: dict[WeightRef, np.ndarray] = {}
        self.keep: list[Any] = []
        self._said: set[GGMLType] = set()
        self.in_place = self.copied = 0

    def stored_type(self, type: GGMLType) -> str:
        """The type that kernels will see."""
        if native(type):
            return type.name
        return "F32" if self._exact else "F16"

    def matrix(self, ref: WeightRef) -> Packed:
        """`[rows, k]` in its stored type."""
        if ref not in self._packed:
            given = self._source.raw(ref)
            stored = self.stored_type(ref.type)
            if native(ref.type):
                raw = given.raw if given.raw.flags.c_contiguous else np.ascontiguousarray(given.raw)
                self.in_place += raw.nbytes
            else:
                if ref.type not in self._said:
                    self._said.add(ref.type)
                    _log.warning("%s has no kernel of its own: its tensors are kept as %s", ref.type.name, stored)
                dense = given.dense()
                raw = dense if self._exact else dense.astype(np.float16)
                self.copied += raw.nbytes
            self.keep.append(raw)
            bytes_per_row = raw.nbytes // ref.rows
            self._packed[ref] = Packed(stored, int(raw.ctypes.data), bytes_per_row, ref.rows, ref.k)
        return self._packed[ref]

    def dense(self, ref: WeightRef) -> np.ndarray:
        """float32 `[rows, k]`, for what is rearranged before use."""
        return self._source.raw(ref).dense()

    def vector(self, ref: WeightRef) -> int:
        """Address of a small tensor (gain, bias, sink, decay) as float32."""
        if ref not in self._vectors:
            dense = np.ascontiguousarray(self._source.raw(ref).dense().reshape(-1), np.float32)
            # Kernels may load whole vectors of sixteen at the end.
            padded = np.zeros(len(dense) + 16, np.float32)
            padded[: len(dense)] = dense
            self._vectors[ref] = padded
            self.copied += padded.nbytes
        return int(self._vectors[ref].ctypes.data)
