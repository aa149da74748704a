"""The weights of a program: matrices packed in their own format, vectors and tables as float32."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import mlx.core as mx
import numpy as np

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.pack import LAYOUTS, Packed, pack, packed_bytes
from quarrel.ops.contract import Compute, ConstRef, WeightRef
from quarrel.ops.step import WeightSource
from quarrel.ops.weights import Loading, rows_as

log = logging.getLogger("quarrel")


def held_as(type: GGMLType, compute: Compute) -> GGMLType:
    """Its own format if kernels read it, else the float type that the reference's values are rounded to."""
    if type in LAYOUTS:
        return type
    return GGMLType.F32 if compute == "float32" else GGMLType.F16


def device_bytes(refs: Iterable[WeightRef], compute: Compute) -> int:
    """What these weights take once packed; vectors are few and small enough to be counted as if they were."""
    return sum(packed_bytes(held_as(r.type, compute), r.rows, r.k) for r in refs)


class Weights:
    """Packs on first use and hands out what it has packed; `progress` hears bytes of the file done and in all."""

    def __init__(
        self,
        source: WeightSource,
        compute: Compute,
        refs: Iterable[WeightRef] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source, self._compute = source, compute
        self._loading = Loading(refs, progress)
        self._packed: dict[WeightRef, Packed] = {}
        self._vectors: dict[WeightRef, mx.array] = {}
        self._consts: dict[tuple[float, ...], mx.array] = {}

    def finish(self) -> None:
        """Says which types had to be dequantised."""
        foreign = sorted({r.type.name for r in self._packed if r.type not in LAYOUTS})
        if foreign:
            as_type = held_as(GGMLType.IQ1_S, self._compute).name
            log.warning("%s tensors are dequantised to %s at load: no kernel reads them", ", ".join(foreign), as_type)

    def matrix(self, ref: WeightRef) -> Packed:
        if ref not in self._packed:
            target = held_as(ref.type, self._compute)
            self._packed[ref] = pack(target, ref.rows, ref.k, rows_as(self._source, ref, target))
            # One weight at a time, so that host copies do not pile up behind lazy arrays.
            mx.eval(self._packed[ref].planes)
            self._loading.have(ref)
        return self._packed[ref]

    def vector(self, ref: WeightRef) -> mx.array:
        if ref not in self._vectors:
            values = self._source.raw(ref).dense().reshape(-1)
            self._vectors[ref] = mx.array(np.array(values, np.float32))
            self._loading.have(ref)
        return self._vectors[ref]

    def const(self, ref: ConstRef) -> mx.array:
        if ref.data not in self._consts:
            self._consts[ref.data] = mx.array(np.array(ref.data, np.float32))
        return self._consts[ref.data]

    def nbytes(self) -> int:
        vectors = (*self._vectors.values(), *self._consts.values())
        return sum(p.nbytes for p in self._packed.values()) + sum(v.nbytes for v in vectors)
