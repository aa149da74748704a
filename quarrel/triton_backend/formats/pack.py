"""Raw GGUF blocks to planes that a kernel reads with aligned loads, on the device, a bounded piece at a time.

The planes of a weight are slices of one buffer, each 256-byte aligned and row-major; `layout.py` says what they hold.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops.contract import Array
from quarrel.triton_backend.formats.table import NATIVE
from quarrel.triton_backend.runtime.arrays import Packed, Planes

_ALIGN = 256
_CHUNK = 16 << 20
ROWS_BESIDE = 256
"""Rows that are aligned in every plane, as a row of one has a byte or more."""


class Uploader:
    """Moves host bytes to the device through one pinned staging buffer; host memory stays at its size."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        pin = device.type == "cuda"
        self._stages = [torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=pin) for _ in range(2 if pin else 1)]
        self._done = [torch.cuda.Event() for _ in self._stages] if pin else []
        self._turn = 0

    def rows_at_once(self, row_bytes: int) -> int:
        """How many rows fit the staging buffer; a single longer row is moved in pieces."""
        return max(1, _CHUNK // row_bytes)

    def __call__(self, raw: Array) -> torch.Tensor:
        """uint8 `[rows, row_bytes]` on the device."""
        out = torch.empty(raw.shape, dtype=torch.uint8, device=self.device)
        flat, source = out.view(-1), raw.reshape(-1)
        for start in range(0, source.size, _CHUNK):
            piece = source[start : start + _CHUNK]
            stage = self._stages[self._turn]
            if self._done:
                self._done[self._turn].synchronize()
            np.copyto(stage.numpy()[: piece.size], piece)
            flat[start : start + piece.size].copy_(stage[: piece.size], non_blocking=True)
            if self._done:
                self._done[self._turn].record()
            self._turn = (self._turn + 1) % len(self._stages)
        return out


def packed_bytes(type: GGMLType, n: int, k: int) -> int:
    """Device bytes of a weight; `type` is one of `NATIVE`."""
    return sum(_padded(p.per_row(k) * n * p.dtype.itemsize) for p in NATIVE[type].planes if p is not None)


def pack(type: GGMLType, n: int, k: int, read: Callable[[int, int], Array], upload: Uploader) -> Packed:
    """The planes of a weight whose type is in `NATIVE`; `read(start, stop)` gives raw rows, uint8 `[.., row_bytes]`."""
    packed = blank(type, n, k, upload.device)
    fill(packed, type, read, upload)
    return packed


def blank(type: GGMLType, n: int, k: int, device: torch.device) -> Packed:
    """The planes without their values."""
    return view(type, n, k, torch.empty(packed_bytes(type, n, k), dtype=torch.uint8, device=device))


def fill(
    packed: Packed,
    type: GGMLType,
    read: Callable[[int, int], Array],
    upload: Uploader,
    at: int = 0,
    rows: int | None = None,
) -> None:
    """Writes the planes of a weight of this type: all its rows, or so many from `at` on."""
    block, count = FORMATS[type], packed.n if rows is None else rows
    step = upload.rows_at_once(packed.k // block.elements * block.nbytes)
    for start in range(0, count, step):
        put(packed, type, at + start, upload(read(start, min(start + step, count))))


def put(packed: Packed, type: GGMLType, start: int, raw: torch.Tensor) -> None:
    """Writes rows from `start` on into the planes; raw is uint8 `[rows, row_bytes]` on their device, contiguous."""
    rows = len(raw)
    for plane, made in zip(packed.planes, NATIVE[type].split(raw.view(rows, -1, FORMATS[type].nbytes)), strict=True):
        if made is not None:
            plane[start : start + rows] = made.reshape(rows, -1)


def view(type: GGMLType, n: int, k: int, buffer: torch.Tensor) -> Packed:
    """A packed weight by its bytes, `[packed_bytes]`."""
    planes: list[torch.Tensor] = []
    offset = 0
    for plane in NATIVE[type].planes:
        if plane is None:
            planes.append(planes[0])
            continue
        size = plane.per_row(k) * n * plane.dtype.itemsize
        planes.append(buffer[offset : offset + size].view(plane.dtype).view(n, -1))
        offset += _padded(size)
    return Packed(type.name, n, k, buffer, Planes(*planes))


def rows_of(whole: Packed, at: int, count: int) -> Packed:
    """Some rows of a packed weight, as one of its own; `at` is a multiple of ROWS_BESIDE, so that planes stay aligned."""
    codes = whole.planes.codes[at : at + count]
    planes = Planes(*(codes if p is whole.planes.codes else p[at : at + count] for p in whole.planes))
    first, last = (row * whole.nbytes // whole.n for row in (at, at + count))
    return Packed(whole.format, count, whole.k, whole.buffer[first:last], planes, whole=whole)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
