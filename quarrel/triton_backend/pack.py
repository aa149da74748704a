"""Raw GGUF blocks to planes that a kernel reads with aligned loads, on the device, a bounded piece at a time.

The planes of a weight are slices of one buffer, each 256-byte aligned and row-major; `formats.py` says what they mean.
Only Q4_K, Q5_K and IQ4_XS grow: their 6-bit scales are widened to bytes (at most 2.8% of the weight).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops.contract import Array

F16, I8, U8, I16, I32 = torch.float16, torch.int8, torch.uint8, torch.int16, torch.int32
Planes = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_ALIGN = 256
_CHUNK = 16 << 20


@dataclass(frozen=True)
class Plane:
    """`count` entries of `dtype` in every run of `columns`."""

    dtype: torch.dtype
    count: int
    columns: int = 32

    def per_row(self, k: int) -> int:
        return self.count * (k // self.columns)


@dataclass(frozen=True)
class Layout:
    """The planes of a format and `split`, which makes them from raw blocks `[rows, blocks, nbytes]` uint8."""

    split: Callable[[torch.Tensor], Planes]
    codes: Plane
    bits: Plane | None = None
    scale: Plane | None = None
    top: Plane | None = None

    def planes(self) -> tuple[Plane | None, ...]:
        return (self.codes, self.bits, self.scale, self.top)


@dataclass(frozen=True)
class Packed:
    """A weight on the device: `n` rows of `k` columns. Absent planes are the first one again: a kernel never reads them."""

    format: str
    n: int
    k: int
    buffer: torch.Tensor
    planes: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()


class Uploader:
    """Moves host bytes to the device through one pinned staging buffer; host memory stays at its size."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        pin = device.type == "cuda"
        self._halves = [torch.empty(_CHUNK, dtype=U8, pin_memory=pin) for _ in range(2 if pin else 1)]
        self._done = [torch.cuda.Event() for _ in self._halves] if pin else []
        self._turn = 0

    def rows_at_once(self, row_bytes: int) -> int:
        """How many rows fit the staging buffer; a single longer row is moved in pieces."""
        return max(1, _CHUNK // row_bytes)

    def __call__(self, raw: Array) -> torch.Tensor:
        """uint8 `[rows, row_bytes]` on the device."""
        out = torch.empty(raw.shape, dtype=U8, device=self.device)
        flat, source = out.view(-1), raw.reshape(-1)
        for start in range(0, source.size, _CHUNK):
            piece = source[start : start + _CHUNK]
            half = self._halves[self._turn]
            if self._done:
                self._done[self._turn].synchronize()
            np.copyto(half.numpy()[: piece.size], piece)
            flat[start : start + piece.size].copy_(half[: piece.size], non_blocking=True)
            if self._done:
                self._done[self._turn].record()
            self._turn = (self._turn + 1) % len(self._halves)
        return out


def packed_bytes(type: GGMLType, n: int, k: int) -> int:
    """Device bytes of a weight; `type` is one of `LAYOUTS`."""
    return sum(_padded(p.per_row(k) * n * p.dtype.itemsize) for p in LAYOUTS[type].planes() if p is not None)


def pack(type: GGMLType, n: int, k: int, read: Callable[[int, int], Array], upload: Uploader) -> Packed:
    """The planes of a weight whose type is in `LAYOUTS`; `read(start, stop)` gives raw rows, uint8 `[.., row_bytes]`."""
    packed = blank(type, n, k, upload.device)
    fill(packed, type, read, upload)
    return packed


def blank(type: GGMLType, n: int, k: int, device: torch.device) -> Packed:
    """The planes without their values."""
    return view(type, n, k, torch.empty(packed_bytes(type, n, k), dtype=U8, device=device))


def fill(packed: Packed, type: GGMLType, read: Callable[[int, int], Array], upload: Uploader) -> None:
    """Writes the planes of a weight of this type."""
    block = FORMATS[type]
    step = upload.rows_at_once(packed.k // block.elements * block.nbytes)
    for start in range(0, packed.n, step):
        put(packed, type, start, upload(read(start, min(start + step, packed.n))))


def put(packed: Packed, type: GGMLType, start: int, raw: torch.Tensor) -> None:
    """Writes rows from `start` on into the planes; raw is uint8 `[rows, row_bytes]` on their device, contiguous."""
    rows = len(raw)
    for plane, made in zip(packed.planes, LAYOUTS[type].split(raw.view(rows, -1, FORMATS[type].nbytes)), strict=True):
        if made is not None:
            plane[start : start + rows] = made.reshape(rows, -1)


def view(type: GGMLType, n: int, k: int, buffer: torch.Tensor) -> Packed:
    """A packed weight by its bytes, `[packed_bytes]`."""
    planes: list[torch.Tensor] = []
    offset = 0
    for plane in LAYOUTS[type].planes():
        if plane is None:
            planes.append(planes[0])
            continue
        size = plane.per_row(k) * n * plane.dtype.itemsize
        planes.append(buffer[offset : offset + size].view(plane.dtype).view(n, -1))
        offset += _padded(size)
    return Packed(type.name, n, k, buffer, tuple(planes))  # type: ignore[arg-type]


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _view(raw: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    # A copy always: the slice of a single block is contiguous as it lies, at any address.
    return raw[..., start:stop].clone(memory_format=torch.contiguous_format).view(dtype)


def _wide(dtype: torch.dtype) -> Callable[[torch.Tensor], Planes]:
    return lambda raw: (raw.reshape(len(raw), -1).view(dtype), None, None, None)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits `[..., 32]` to bytes `[..., 16]`, column j below column j + 16."""
    return codes[..., :16] | (codes[..., 16:] << 4)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 1 or 2 bits `[..., 32]` to int32 words, the first column lowest."""
    per = 8 // bits
    shift = torch.arange(0, 8, bits, dtype=U8, device=codes.device)
    parts = codes.reshape(*codes.shape[:-1], 32 // per, per) << shift
    return parts.sum(-1, dtype=I32).to(U8).view(I32)


def _unshift(raw: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """`[..., bytes]` to `[..., len(shifts), bytes]`: the same bytes shifted down by each."""
    return (raw.unsqueeze(-2) >> torch.tensor(shifts, dtype=U8, device=raw.device)[:, None]) & mask


def _split_block32(scales: int, high: bool) -> Callable[[torch.Tensor], Planes]:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL: halves, then one word of fifth bits, then nibbles in the planes' own order."""

    def split(raw: torch.Tensor) -> Planes:
        at = 2 * scales
        words = _view(raw, at, at + 4, I32) if high else None
        return raw[..., at + 4 * high :], words, _view(raw, 0, at, F16), None

    return split


def _q8_0(raw: torch.Tensor) -> Planes:
    return _view(raw, 2, 34, I8), None, _view(raw, 0, 2, F16), None


def _mxfp4(raw: torch.Tensor) -> Planes:
    return raw[..., 1:], None, raw[..., :1], None


def _scales_6bit(s: torch.Tensor) -> torch.Tensor:
    """The 12 bytes of Q4_K and Q5_K to `[..., 8, 2]` bytes: scale and minimum of each block of 32."""
    a, b, c = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scale = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], -1)
    minimum = torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], -1)
    return torch.stack([scale, minimum], -1)


def _q4_k(raw: torch.Tensor) -> Planes:
    rows, blocks, _ = raw.shape
    codes = _unshift(raw[..., 16:].view(rows, blocks, 4, 32), (0, 4), 15)  # [rows, blocks, 4, 2, 32]
    return _nibbles(codes), None, _scales_6bit(raw[..., 4:16]), _view(raw, 0, 4, F16)


def _q5_k(raw: torch.Tensor) -> Planes:
    rows, blocks, _ = raw.shape
    codes = _unshift(raw[..., 48:].view(rows, blocks, 4, 32), (0, 4), 15)
    fifth = _unshift(raw[..., 16:48], (0, 1, 2, 3, 4, 5, 6, 7), 1)  # [rows, blocks, 8, 32]
    return _nibbles(codes), _words(fifth, 1), _scales_6bit(raw[..., 4:16]), _view(raw, 0, 4, F16)


def _q6_k(raw: torch.Tensor) -> Planes:
    rows, blocks, _ = raw.shape
    codes = _unshift(raw[..., :128].view(rows, blocks, 2, 64), (0, 4), 15).reshape(rows, blocks, 8, 32)
    upper = _unshift(raw[..., 128:192].view(rows, blocks, 2, 32), (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 32)
    return _nibbles(codes), _words(upper, 2), _view(raw, 192, 208, I8), _view(raw, 208, 210, F16)


def _q2_k(raw: torch.Tensor) -> Planes:
    rows, blocks, _ = raw.shape
    codes = _unshift(raw[..., 16:80].view(rows, blocks, 2, 32), (0, 2, 4, 6), 3)  # [rows, blocks, 2, 4, 32]
    return _words(codes, 2), None, raw[..., :16], _view(raw, 80, 84, F16)


def _q3_k(raw: torch.Tensor) -> Planes:
    rows, blocks, _ = raw.shape
    codes = _unshift(raw[..., 32:96].view(rows, blocks, 2, 32), (0, 2, 4, 6), 3)
    third = _unshift(raw[..., :32], (0, 1, 2, 3, 4, 5, 6, 7), 1)  # [rows, blocks, 8, 32]
    lower = _unshift(raw[..., 96:104], (0, 4), 15).reshape(rows, blocks, 8, 2)
    upper = _unshift(raw[..., 104:108], (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 2)
    nibble = upper[..., 0] | (upper[..., 1] << 2)  # [rows, blocks, 8]
    words = (nibble[..., 0::2] | (nibble[..., 1::2] << 4)).contiguous().view(F16)  # [rows, blocks, 2]
    top = torch.cat([_view(raw, 108, 110, F16).view(I16), words.view(I16)], -1).view(F16)
    return _words(codes, 2), _words(third, 1), lower[..., 0] | (lower[..., 1] << 4), top


def _iq4_xs(raw: torch.Tensor) -> Planes:
    lower = _unshift(raw[..., 4:8], (0, 4), 15).transpose(-1, -2).flatten(-2)  # [rows, blocks, 8]
    upper = _unshift(raw[..., 2:4], (0, 2, 4, 6), 3).transpose(-1, -2).flatten(-2)
    scale = (lower | (upper << 4)).to(I8) - 32
    return raw[..., 8:], None, scale, _view(raw, 0, 2, F16)


_NIBBLES = Plane(U8, 16)
_BITS2, _BITS1 = Plane(I32, 2), Plane(I32, 1)
_ONE, _TWO = Plane(F16, 1), Plane(F16, 2)

LAYOUTS: Mapping[GGMLType, Layout] = {
    GGMLType.F32: Layout(_wide(torch.float32), Plane(torch.float32, 1, 1)),
    GGMLType.F16: Layout(_wide(F16), Plane(F16, 1, 1)),
    GGMLType.BF16: Layout(_wide(I16), Plane(I16, 1, 1)),
    GGMLType.Q4_0: Layout(_split_block32(1, False), _NIBBLES, scale=_ONE),
    GGMLType.Q4_1: Layout(_split_block32(2, False), _NIBBLES, scale=_TWO),
    GGMLType.Q5_0: Layout(_split_block32(1, True), _NIBBLES, _BITS1, _ONE),
    GGMLType.Q5_1: Layout(_split_block32(2, True), _NIBBLES, _BITS1, _TWO),
    GGMLType.Q8_0: Layout(_q8_0, Plane(I8, 32), scale=_ONE),
    GGMLType.IQ4_NL: Layout(_split_block32(1, False), _NIBBLES, scale=_ONE),
    GGMLType.MXFP4: Layout(_mxfp4, _NIBBLES, scale=Plane(U8, 1)),
    GGMLType.Q2_K: Layout(_q2_k, _BITS2, scale=Plane(U8, 2), top=Plane(F16, 2, 256)),
    GGMLType.Q3_K: Layout(_q3_k, _BITS2, _BITS1, Plane(U8, 1), Plane(F16, 3, 256)),
    GGMLType.Q4_K: Layout(_q4_k, _NIBBLES, scale=Plane(U8, 2), top=Plane(F16, 2, 256)),
    GGMLType.Q5_K: Layout(_q5_k, _NIBBLES, _BITS1, Plane(U8, 2), Plane(F16, 2, 256)),
    GGMLType.Q6_K: Layout(_q6_k, _NIBBLES, _BITS2, Plane(I8, 2), Plane(F16, 1, 256)),
    GGMLType.IQ4_XS: Layout(_iq4_xs, _NIBBLES, scale=Plane(I8, 1), top=Plane(F16, 1, 256)),
}
"""How each native format lies on the device."""
