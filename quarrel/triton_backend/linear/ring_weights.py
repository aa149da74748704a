"""Packed matrices as the ring's TMA copies read them."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quarrel.gguf import GGMLType
from quarrel.triton_backend.formats.table import NATIVE, by_name
from quarrel.triton_backend.runtime.arrays import Packed
from quarrel.triton_backend.runtime.launch import cdiv


class Matrices:
    """A stack of packed matrices as TMA reads it: rows of a copy are whole numbers of 16 bytes apart and have 16 or more.

    Codes are as they were packed. Scales and upper bits of which a row is no such number, and the scales of super-blocks,
    are copied once, transposed (`transposed`): 2 to 11 % of a matrix's bytes, up to 27 of Q5_0.
    """

    def __init__(self, weight: Packed) -> None:
        codes, bits, scale, top = (plane.reshape(weight.n, -1).view(torch.uint8) for plane in weight.planes)
        made = by_name(weight.format)
        self.bits = made.bits.count if made.bits else 0
        self.byte_scales = scale.shape[1] == weight.k // 32
        self.tops = made.top is not None
        self.scale_transposed = self.byte_scales or scale.shape[1] % 16 != 0
        self.bits_transposed = bool(self.bits) and bits.shape[1] % 16 != 0
        self._codes = codes.view(torch.int32)
        entries = scale if self.byte_scales else scale.view(torch.int16)
        self._scale = transposed(entries) if self.scale_transposed else entries
        self._bits = self._top = self._codes
        if self.bits:
            words = bits.view(torch.int32)
            self._bits = transposed(words) if self.bits_transposed else words
        if made.top is not None:
            self._top = transposed(top.view(torch.int32 if made.top.count == 2 else torch.int16), torch.int32)
        self._made: dict[int, tuple[Any, ...]] = {}

    @classmethod
    def of(cls, weight: Packed) -> Matrices:
        """Those of a weight, which it keeps for every kernel that reads it so."""
        if "ring" not in weight.derived:
            weight.derived["ring"] = cls(weight)
        return weight.derived["ring"]

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        made = [self._scale] * self.scale_transposed + [self._bits] * self.bits_transposed + [self._top] * self.tops
        return sum(plane.untyped_storage().nbytes() for plane in made)

    def descriptors(self, rows: int) -> tuple[Any, ...]:
        """Of codes, scales, upper bits and scales of super-blocks, in boxes of so many rows."""
        if rows not in self._made:
            codes = bits = top = _boxes(self._codes, [rows, 32], 128)
            scale = _boxes(self._scale, [8, rows] if self.scale_transposed else [rows, 8])
            if self.bits:
                width = 8 * self.bits
                bits = (
                    _boxes(self._bits, [8, rows]) if self.bits_transposed else _boxes(self._bits, [rows, width], 4 * width)
                )
            if self.tops:
                top = _boxes(self._top, [1, rows])
            self._made[rows] = codes, scale, bits, top
        return self._made[rows]


def transposed(plane: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A plane `[n, entries]` as `[entries, n]`, with rows that are whole numbers of 16 bytes apart."""
    n, entries = plane.shape
    room = torch.zeros((entries, cdiv(n, 16) * 16), dtype=dtype or plane.dtype, device=plane.device)
    room[:, :n] = plane.T
    return room[:, :n]


def _transposed_planes(type: GGMLType, k: int) -> list[tuple[int, int]]:
    """Of what `Matrices` copies of a matrix: entries of a row, and bytes of an entry."""
    made = NATIVE[type]
    if made.ring is None or made.scale is None:
        return []
    scale = made.scale.per_row(k) * made.scale.dtype.itemsize
    entry = 1 if made.scale.per_row(32) * made.scale.dtype.itemsize == 1 else 2
    bits = made.bits.per_row(k) if made.bits else 0
    planes = [(scale // entry, entry)] if entry == 1 or scale % 16 else []
    planes += [(bits, 4)] if 4 * bits % 16 else []
    return [*planes, (k // 256, 4)] if made.top else planes


def transposed_bytes(type: GGMLType, n: int, k: int) -> int:
    """What `Matrices` copies of a matrix."""
    return sum(entries * size for entries, size in _transposed_planes(type, k)) * cdiv(n, 16) * 16


def rows_of_stack(type: GGMLType, k: int) -> int:
    """Of how many rows each matrix of a stack must have a multiple: a copy by TMA begins at whole 16 bytes of a row.

    On an H200 a copy that does not (the second of four matrices of 19 rows) ends in "an illegal instruction".
    """
    return max((16 // size for _, size in _transposed_planes(type, k)), default=1)


def _boxes(plane: torch.Tensor, shape: list[int], swizzle: int = 0) -> Any:
    return TensorDescriptor.from_tensor(plane, shape, gl.NVMMASharedLayout(swizzle, 8 * plane.element_size(), 2))
