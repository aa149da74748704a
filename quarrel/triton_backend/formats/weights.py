"""The weights of a program on its GPU: matrices packed in their own format, vectors and tables as float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops.contract import Array, Compute, ConstRef, WeightRef
from quarrel.ops.step import WeightSource
from quarrel.ops.weights import PackedWeights, rows_as, stored_type
from quarrel.triton_backend.formats.pack import ROWS_BESIDE, Uploader, blank, fill, pack, packed_bytes, rows_of
from quarrel.triton_backend.formats.table import NATIVE
from quarrel.triton_backend.runtime.arrays import Packed


def stored_as(type: GGMLType, compute: Compute) -> GGMLType:
    """The format of a matrix on the device."""
    return stored_type(type, NATIVE, compute)


def device_bytes(refs: Iterable[WeightRef], compute: Compute) -> int:
    """What these weights take once packed; vectors are so small that they are counted as if they were matrices."""
    return sum(packed_bytes(stored_as(r.type, compute), r.rows, r.k) for r in refs)


def fit_beside(refs: Sequence[WeightRef], parts: int = 1) -> bool:
    """Whether the rows of these matrices can follow each other as those of one: the last may have any number, and of its
    columns so many parts, each as wide as the others are."""
    *others, last = refs
    if len(set(refs)) < len(refs) or not others or last.k % (parts * FORMATS[last.type].elements):
        return False
    one_kind = len({*((ref.type, ref.k) for ref in others), (last.type, last.k // parts)}) == 1
    return one_kind and all(ref.rows % ROWS_BESIDE == 0 for ref in others)


def blank_beside(
    refs: Sequence[WeightRef], compute: Compute, device: torch.device, parts: int = 1
) -> Iterator[tuple[WeightRef, int, Packed]]:
    """A matrix of all their rows, without values: of each, the first row there and its rows as a matrix."""
    counts = [*(ref.rows for ref in refs[:-1]), refs[-1].rows * parts]
    whole, at = blank(stored_as(refs[0].type, compute), sum(counts), refs[0].k, device), 0
    for ref, count in zip(refs, counts, strict=True):
        yield ref, at, rows_of(whole, at, count)
        at += count


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

    def nbytes(self) -> int:
        """Device bytes of all that is packed, and of what kernels made of it."""
        packed = {id(p): p for own in self._packed.values() for p in (own, own.whole) if p is not None}
        return super().nbytes() + sum(made.nbytes for p in packed.values() for made in p.derived.values())

    def beside(self, refs: Sequence[WeightRef], parts: int = 1) -> None:
        """Packs matrices that one launch reads as the rows of one, where their formats and columns are one. Of the last,
        so many parts of the columns are such rows, one after the other: a copy of it, which is packed by itself too."""
        if not fit_beside(refs, parts) or any(ref in self._packed for ref in refs):
            return
        for ref, at, rows in blank_beside(refs, self._compute, self._device, parts):
            type = stored_as(ref.type, self._compute)
            read = rows_as(self._source, ref, type)
            assert rows.whole is not None
            if rows.k != ref.k:
                for i in range(parts):
                    columns = partial(_columns, read, i, parts)
                    fill(rows.whole, type, columns, self._upload_blocks(), at + i * ref.rows, ref.rows)
                continue
            fill(rows.whole, type, read, self._upload_blocks(), at, ref.rows)
            self._packed[ref] = rows
            self._loading.loaded(ref)

    def _upload_blocks(self) -> Uploader:
        if self._uploader is None:
            self._uploader = Uploader(self._device)
        return self._uploader

    def _pack(self, type: GGMLType, rows: int, k: int, read: Callable[[int, int], Array]) -> Packed:
        return pack(type, rows, k, read, self._upload_blocks())

    def _upload(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.float32)).to(self._device)


def _columns(read: Callable[[int, int], Array], part: int, parts: int, start: int, stop: int) -> Array:
    """One of so many parts of the columns of these rows."""
    rows = read(start, stop)
    width = rows.shape[1] // parts
    return rows[:, part * width : (part + 1) * width]


META = torch.device("meta")
"""Of tensors without storage."""


class Blank:
    """Weights without storage, for a plan that only says which kernels it would launch."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._packed: dict[WeightRef, Packed] = {}

    def beside(self, refs: Sequence[WeightRef], parts: int = 1) -> None:
        """As `Weights.beside`."""
        if fit_beside(refs, parts) and not any(ref in self._packed for ref in refs):
            beside = blank_beside(refs, self._compute, META, parts)
            self._packed |= {ref: rows for ref, _, rows in beside if rows.k == ref.k}

    def matrix(self, ref: WeightRef) -> Packed:
        if ref not in self._packed:
            self._packed[ref] = blank(stored_as(ref.type, self._compute), ref.rows, ref.k, META)
        return self._packed[ref]

    def vector(self, ref: WeightRef) -> torch.Tensor:
        return torch.empty(ref.rows * ref.k, device=META)

    def const(self, ref: ConstRef) -> torch.Tensor:
        return torch.empty(len(ref.data), device=META)
