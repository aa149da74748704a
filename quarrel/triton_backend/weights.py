"""The weights of a program on its device: matrices packed in their own format, vectors and tables as float32."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
import torch

from quarrel.gguf import GGMLType
from quarrel.ops.contract import Compute, ConstRef, WeightRef
from quarrel.ops.step import WeightSource
from quarrel.ops.weights import Loading, rows_as
from quarrel.triton_backend.pack import LAYOUTS, Packed, Uploader, pack, packed_bytes

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
        device: torch.device,
        compute: Compute,
        refs: Iterable[WeightRef] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source, self._device, self._compute = source, device, compute
        self._loading = Loading(refs, progress)
        self._upload: Uploader | None = None
        self._packed: dict[WeightRef, Packed] = {}
        self._vectors: dict[WeightRef, torch.Tensor] = {}
        self._consts: dict[tuple[float, ...], torch.Tensor] = {}

    def finish(self) -> None:
        """Gives the staging memory back, and says which types had to be dequantised."""
        self._upload = None
        foreign = sorted({r.type.name for r in self._packed if r.type not in LAYOUTS})
        if foreign:
            as_type = held_as(GGMLType.IQ1_S, self._compute).name
            log.warning("%s tensors are dequantised to %s at load: no kernel reads them", ", ".join(foreign), as_type)

    def matrix(self, ref: WeightRef) -> Packed:
        if ref not in self._packed:
            if self._upload is None:
                self._upload = Uploader(self._device)
            target = held_as(ref.type, self._compute)
            self._packed[ref] = pack(target, ref.rows, ref.k, rows_as(self._source, ref, target), self._upload)
            self._loading.have(ref)
        return self._packed[ref]

    def vector(self, ref: WeightRef) -> torch.Tensor:
        if ref not in self._vectors:
            values = self._source.raw(ref).dense().reshape(-1)
            self._vectors[ref] = torch.from_numpy(np.array(values, np.float32)).to(self._device)
            self._loading.have(ref)
        return self._vectors[ref]

    def const(self, ref: ConstRef) -> torch.Tensor:
        if ref.data not in self._consts:
            self._consts[ref.data] = torch.tensor(ref.data, dtype=torch.float32, device=self._device)
        return self._consts[ref.data]

    def nbytes(self) -> int:
        vectors = (*self._vectors.values(), *self._consts.values())
        return sum(p.nbytes for p in self._packed.values()) + sum(v.numel() * 4 for v in vectors)
