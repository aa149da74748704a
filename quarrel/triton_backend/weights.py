"""The weights of a program on its device: matrices packed in their own format, vectors and tables as float32."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
import torch

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops.contract import Array, Compute, ConstRef, RawWeight, WeightRef
from quarrel.ops.draw import as_float_type
from quarrel.ops.program import Node
from quarrel.ops.step import WeightSource
from quarrel.triton_backend.pack import LAYOUTS, Packed, Uploader, pack, packed_bytes

log = logging.getLogger("quarrel")


def held_as(type: GGMLType, compute: Compute) -> GGMLType:
    """Its own format if kernels read it, else the float type that the reference's values are rounded to."""
    if type in LAYOUTS:
        return type
    return GGMLType.F32 if compute == "float32" else GGMLType.F16


def matrices(nodes: Iterable[Node]) -> list[WeightRef]:
    """Every weight used as `[n, k]`, once, in order of use."""
    return list(dict.fromkeys(ref for node in nodes for ref in _refs(node, 2)))


def _refs(node: Node, rank: int) -> list[WeightRef]:
    pairs = zip(node.op.params(node.spec), node.inputs, strict=True)
    return [ref for p, ref in pairs if isinstance(ref, WeightRef) and len(p.dims(node.spec)) == rank]


def file_bytes(ref: WeightRef) -> int:
    """Bytes of the rows in the file."""
    block = FORMATS[ref.type]
    return ref.rows * (ref.k // block.elements) * block.nbytes


def device_bytes(nodes: Iterable[Node], compute: Compute) -> int:
    """What `Weights` will hold for these nodes."""
    nodes = list(nodes)
    vectors = {ref for node in nodes for ref in _refs(node, 1)}
    held = sum(packed_bytes(held_as(r.type, compute), r.rows, r.k) for r in matrices(nodes))
    return held + 4 * sum(r.rows * r.k for r in vectors)


class Weights:
    """Packs on first use and hands out what it has packed."""

    def __init__(self, source: WeightSource, device: torch.device, compute: Compute) -> None:
        self._source, self._device, self._compute = source, device, compute
        self._upload: Uploader | None = Uploader(device)
        self._packed: dict[WeightRef, Packed] = {}
        self._vectors: dict[WeightRef, torch.Tensor] = {}
        self._consts: dict[tuple[float, ...], torch.Tensor] = {}

    def pack_all(self, refs: list[WeightRef], progress: Callable[[int, int], None] | None) -> None:
        """Packs `refs` one after another, reporting bytes of the file done and in all; gives the staging memory back."""
        whole, done = sum(map(file_bytes, refs)), 0
        for ref in refs:
            self.matrix(ref)
            done += file_bytes(ref)
            if progress is not None:
                progress(done, whole)
        foreign = sorted({r.type.name for r in refs if r.type not in LAYOUTS})
        if foreign:
            as_type = held_as(GGMLType.IQ1_S, self._compute).name
            log.warning("%s tensors are dequantised to %s at load: no kernel reads them", ", ".join(foreign), as_type)
        self._upload = None

    def matrix(self, ref: WeightRef) -> Packed:
        if ref not in self._packed:
            if self._upload is None:
                self._upload = Uploader(self._device)
            raw, target = self._source.raw(ref), held_as(ref.type, self._compute)

            def read(start: int, stop: int) -> Array:
                rows = RawWeight(raw.type, raw.raw[start:stop], raw.k)
                return rows.raw if raw.type == target else as_float_type(rows.dense(), target)

            self._packed[ref] = pack(target, ref.rows, ref.k, read, self._upload)
        return self._packed[ref]

    def vector(self, ref: WeightRef) -> torch.Tensor:
        if ref not in self._vectors:
            values = self._source.raw(ref).dense().reshape(-1)
            self._vectors[ref] = torch.from_numpy(np.array(values, np.float32)).to(self._device)
        return self._vectors[ref]

    def const(self, ref: ConstRef) -> torch.Tensor:
        if ref.data not in self._consts:
            self._consts[ref.data] = torch.tensor(ref.data, dtype=torch.float32, device=self._device)
        return self._consts[ref.data]

    def nbytes(self) -> int:
        vectors = (*self._vectors.values(), *self._consts.values())
        return sum(p.nbytes for p in self._packed.values()) + sum(v.numel() * 4 for v in vectors)
