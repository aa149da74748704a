"""A weight as kernels read it: planes of arrays, by format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quarrel.gguf import GGMLType
from quarrel.ops.contract import Array

Read = Callable[[int, int], Array]
"""Raw bytes `[stop - start, row_bytes]` of rows start to stop."""


@dataclass(frozen=True, eq=False)
class Packed:
    """`rows` of `k` values of `type`; what the planes hold is the format's affair (`formats.py`)."""

    type: GGMLType
    rows: int
    k: int
    planes: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.planes)


_FLOATS = {GGMLType.F32: mx.float32, GGMLType.F16: mx.float16, GGMLType.BF16: mx.bfloat16}
LAYOUTS = frozenset(_FLOATS)
"""Formats that kernels read as they are."""


def packed_bytes(type: GGMLType, rows: int, k: int) -> int:
    """Bytes of the planes."""
    return rows * k * _FLOATS[type].size


def pack(type: GGMLType, rows: int, k: int, read: Read) -> Packed:
    """Reads all rows, a share of them at a time."""
    raw = np.concatenate([np.ascontiguousarray(read(i, min(i + 4096, rows))) for i in range(0, rows, 4096)])
    plane = mx.array(raw.reshape(-1)).view(_FLOATS[type]).reshape(rows, k)
    return Packed(type, rows, k, (plane,))
