"""The weights of a program on Metal: matrices as the planes of their format, vectors and tables as float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx
import numpy as np

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.layout import Packed, Read, pack
from quarrel.mlx_backend.formats.table import NATIVE, packed_bytes
from quarrel.ops.contract import Array, Compute, WeightRef
from quarrel.ops.step import WeightSource
from quarrel.ops.weights import PackedWeights, stored_type


def stored_as(type: GGMLType, compute: Compute) -> GGMLType:
    """The format of a matrix on the device."""
    return stored_type(type, NATIVE, compute)


def device_bytes(refs: Iterable[WeightRef], compute: Compute) -> int:
    """What these weights take once packed; vectors are so small that they are counted as if they were matrices."""
    return sum(packed_bytes(stored_as(r.type, compute), r.rows, r.k) for r in refs)


class Weights(PackedWeights[Packed, mx.array]):
    """See `ops.weights.PackedWeights`."""

    def __init__(
        self,
        source: WeightSource,
        compute: Compute,
        refs: Iterable[WeightRef] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(source, NATIVE, compute, refs, progress)

    def _pack(self, type: GGMLType, rows: int, k: int, read: Read) -> Packed:
        packed = pack(NATIVE[type], rows, k, read)
        mx.eval(packed.planes)  # one weight at a time, so that host copies do not pile up behind lazy arrays
        return packed

    def _upload(self, values: Array) -> mx.array:
        return mx.array(np.array(values, np.float32))
