"""The weights of a program on its GPU: matrices packed in their own format, vectors and tables as float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from quarrel.gguf import GGMLType
from quarrel.ops.contract import Array, Compute, ConstRef, WeightRef
from quarrel.ops.step import WeightSource
from quarrel.ops.weights import PackedWeights, stored_type
from quarrel.triton_backend.formats.pack import Uploader, blank, pack, packed_bytes
from quarrel.triton_backend.formats.table import NATIVE
from quarrel.triton_backend.runtime.arrays import Packed


def stored_as(type: GGMLType, compute: Compute) -> GGMLType:
    """The format of a matrix on the device."""
    return stored_type(type, NATIVE, compute)


def device_bytes(refs: Iterable[WeightRef], compute: Compute) -> int:
    """What these weights take once packed; vectors are so small that they are counted as if they were matrices."""
    return sum(packed_bytes(stored_as(r.type, compute), r.rows, r.k) for r in refs)


class Weights(PackedWeights[Packed, torch.Tensor]):
    """See `ops.weights.PackedWeights`."""

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        compute: Compute,
        refs: Iterable[WeightRef] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(source, NATIVE, compute, refs, progress)
        self._device = device
        self._uploader: Uploader | None = None

    def finish(self) -> None:
        """Gives the staging memory back, and logs which types had to be dequantised."""
        self._uploader = None
        super().finish()

    def _pack(self, type: GGMLType, rows: int, k: int, read: Callable[[int, int], Array]) -> Packed:
        if self._uploader is None:
            self._uploader = Uploader(self._device)
        return pack(type, rows, k, read, self._uploader)

    def _upload(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.float32)).to(self._device)


META = torch.device("meta")
"""Of tensors without storage."""


class Blank:
    """Weights without storage, for a plan that only says which kernels it would launch."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._packed: dict[WeightRef, Packed] = {}

    def matrix(self, ref: WeightRef) -> Packed:
        if ref not in self._packed:
            self._packed[ref] = blank(stored_as(ref.type, self._compute), ref.rows, ref.k, META)
        return self._packed[ref]

    def vector(self, ref: WeightRef) -> torch.Tensor:
        return torch.empty(ref.rows * ref.k, device=META)

    def const(self, ref: ConstRef) -> torch.Tensor:
        return torch.empty(len(ref.data), device=META)
