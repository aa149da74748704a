"""Raw GGUF blocks to planes that a kernel reads with aligned loads, made by MLX on the device a bounded piece at a time.

`formats.py` says what the planes mean. GGUF's own blocks are 17 to 210 bytes long: read in place, a lane's codes start at
any even (MXFP4: any) byte, and loads are of 2 bytes. In planes every lane loads 8 or 4 aligned bytes of codes, neighbours
load neighbouring bytes, and 6-bit scales are bytes already. Only Q4_K, Q5_K and IQ4_XS grow, by at most 2.8%.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops.contract import Array

Read = Callable[[int, int], Array]
"""Raw bytes `[stop - start, row_bytes]` of rows start to stop."""

_CHUNK = 64 << 20
_LEAST = 8
"""MLX hands arrays of fewer values than this to a kernel in another address space."""

U8, I8, U16, U32, F16 = mx.uint8, mx.int8, mx.uint16, mx.uint32, mx.float16


@dataclass(frozen=True)
class Plane:
    """`count` entries of `dtype` in every run of `columns`."""

    name: str
    dtype: mx.Dtype
    count: int
    columns: int = 32

    def size(self, rows: int, k: int) -> int:
        """Entries of a weight; at least as many as make it a device array."""
        return max(_LEAST, rows * (k // self.columns) * self.count)


@dataclass(frozen=True)
class Layout:
    """The planes of a format, and `split`, which makes them from raw blocks `[rows, blocks, nbytes]` uint8."""

    planes: tuple[Plane, ...]
    split: Callable[[mx.array], Sequence[mx.array]]


@dataclass(frozen=True, eq=False)
class Packed:
    """`rows` of `k` values of `type` as flat arrays, one a plane of its layout, in its order."""

    type: GGMLType
    rows: int
    k: int
    planes: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.planes)


def packed_bytes(type: GGMLType, rows: int, k: int) -> int:
    """Bytes of the planes; `type` is one of `LAYOUTS`."""
    return sum(p.size(rows, k) * p.dtype.size for p in LAYOUTS[type].planes)


def pack(type: GGMLType, rows: int, k: int, read: Read) -> Packed:
    """Reads all rows, at most _CHUNK bytes of them at a time. `type` is one of `LAYOUTS`."""
    layout, block = LAYOUTS[type], FORMATS[type]
    step = max(1, _CHUNK // (k // block.elements * block.nbytes))
    pieces: list[list[mx.array]] = [[] for _ in layout.planes]
    for start in range(0, rows, step):
        raw = mx.array(np.ascontiguousarray(read(start, min(start + step, rows))))
        made = layout.split(raw.reshape(len(raw), -1, block.nbytes))
        flat = [a.reshape(-1) for a in made]
        mx.eval(flat)
        for piece, a in zip(pieces, flat, strict=True):
            piece.append(a)
    planes = []
    for plane, piece in zip(layout.planes, pieces):
        whole = mx.concatenate(piece) if len(piece) > 1 else piece[0]
        missing = plane.size(rows, k) - whole.size
        assert missing >= 0, (type, plane, rows, k, whole.size)
        planes.append(mx.contiguous(mx.pad(whole, (0, missing)) if missing else whole))
        assert whole.dtype == plane.dtype, (type, plane, whole.dtype)
        mx.eval(planes[-1])
        piece.clear()
    return Packed(type, rows, k, tuple(planes))


# A lane holds 16 columns of a block: 8h to 8h + 7, and those plus 16. Metal takes them out of a word as pairs of 16-bit
# fields; pair p is bytes (0, 2) or (1, 3) of word p / 4, low nibbles or (p & 2) high ones. The planes of 1 and 2 bits a
# code hold first the fields of the pairs' first columns, then of the second ones, so that one shift serves both; where
# among the eight a pair's field stands is such that few shifts serve all pairs.
_FIRST = np.array([(p & 1) + 4 * (p >> 2) + 16 * (p >> 1 & 1) for p in range(8)])


def _order(places: Sequence[int]) -> Array:
    """The columns of a block in the order of their fields; `places[p]` is where pair p's field stands."""
    pairs = _FIRST[np.argsort(places)]
    return np.concatenate([np.concatenate([pairs, pairs + 2]) + 8 * h for h in (0, 1)])


_AS_THEY_COME = _order(range(8))
_BESIDE_NIBBLES = {
    # Low pairs and the high pairs beside them four bits apart, as their places in the mantissa are.
    1: _order([(p >> 2) * 2 + (p & 1) + (p & 2) * 2 for p in range(8)]),
    2: _order([(p >> 2) * 4 + (p & 1) + (p & 2) for p in range(8)]),
}
_BESIDE_TWOS = _order([p % 4 * 2 + p // 4 for p in range(8)])


def _bits(raw: mx.array, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
    return mx.contiguous(raw[..., start:stop]).view(dtype)


def _wide(dtype: mx.Dtype) -> Callable[[mx.array], Sequence[mx.array]]:
    return lambda raw: (raw.reshape(-1).view(dtype),)


def _unshift(raw: mx.array, shifts: Sequence[int], mask: int) -> mx.array:
    """`[..., bytes]` to `[..., len(shifts), bytes]`: the same bytes shifted down by each."""
    return (raw[..., None, :] >> mx.array(list(shifts), U8)[:, None]) & mx.array(mask, U8)


def _nibbles(codes: mx.array) -> mx.array:
    """Codes of 4 bits `[..., 32]` to words `[..., 4]`: a byte holds column j below column j + 16."""
    return mx.contiguous(codes[..., :16] | (codes[..., 16:] << 4)).view(U32)


def _fields(codes: mx.array, bits: int, order: Array) -> mx.array:
    """Codes of 1 or 2 bits `[..., 32]` to two words `[..., 2]` of 16 or 32 bits, each the columns of a lane."""
    per = 8 // bits
    ordered = codes[..., mx.array(order)]
    parts = ordered.reshape(*codes.shape[:-1], 32 // per, per) << mx.arange(0, 8, bits).astype(U8)
    return mx.contiguous(parts.sum(-1).astype(U8)).view(U16 if bits == 1 else U32)


def _block32(scales: int, high: bool) -> Callable[[mx.array], Sequence[mx.array]]:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL: halves, then one word of fifth bits, then nibbles in the planes' own order."""

    def split(raw: mx.array) -> Sequence[mx.array]:
        at = 2 * scales
        scale = _bits(raw, 0, at, F16)
        if not high:
            return _bits(raw, at, at + 16, U32), scale
        fifth = _unshift(raw[..., at : at + 4, None], range(8), 1)[..., 0]  # [rows, blocks, 4, 8]
        return _bits(raw, at + 4, at + 20, U32), _fields(fifth.reshape(*raw.shape[:2], 32), 1, _BESIDE_NIBBLES[1]), scale

    return split


def _q8_0(raw: mx.array) -> Sequence[mx.array]:
    return _bits(raw, 2, 34, U32), _bits(raw, 0, 2, F16)


def _mxfp4(raw: mx.array) -> Sequence[mx.array]:
    return _bits(raw, 1, 17, U32), raw[..., 0]


def _scales_6bit(s: mx.array) -> mx.array:
    """The 12 bytes of Q4_K and Q5_K to `[..., 8, 2]` bytes: scale and minimum of each block of 32."""
    a, b, c = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scale = mx.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], -1)
    minimum = mx.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], -1)
    return mx.stack([scale, minimum], -1)


def _q4_k(raw: mx.array) -> Sequence[mx.array]:
    codes = _unshift(raw[..., 16:].reshape(*raw.shape[:2], 4, 32), (0, 4), 15)  # [rows, blocks, 4, 2, 32]
    return _nibbles(codes), _scales_6bit(raw[..., 4:16]), _bits(raw, 0, 4, F16)


def _q5_k(raw: mx.array) -> Sequence[mx.array]:
    codes = _unshift(raw[..., 48:].reshape(*raw.shape[:2], 4, 32), (0, 4), 15)
    fifth = _unshift(raw[..., 16:48], range(8), 1)  # [rows, blocks, 8, 32]
    return _nibbles(codes), _fields(fifth, 1, _BESIDE_NIBBLES[1]), _scales_6bit(raw[..., 4:16]), _bits(raw, 0, 4, F16)


def _q6_k(raw: mx.array) -> Sequence[mx.array]:
    rows, blocks, _ = raw.shape
    codes = _unshift(raw[..., :128].reshape(rows, blocks, 2, 64), (0, 4), 15).reshape(rows, blocks, 8, 32)
    upper = _unshift(raw[..., 128:192].reshape(rows, blocks, 2, 32), (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 32)
    return _nibbles(codes), _fields(upper, 2, _BESIDE_NIBBLES[2]), _bits(raw, 192, 208, I8), _bits(raw, 208, 210, F16)


def _q2_k(raw: mx.array) -> Sequence[mx.array]:
    codes = _unshift(raw[..., 16:80].reshape(*raw.shape[:2], 2, 32), (0, 2, 4, 6), 3)  # [rows, blocks, 2, 4, 32]
    return _fields(codes, 2, _AS_THEY_COME), raw[..., :16], _bits(raw, 80, 84, F16)


def _q3_k(raw: mx.array) -> Sequence[mx.array]:
    rows, blocks, _ = raw.shape
    codes = _unshift(raw[..., 32:96].reshape(rows, blocks, 2, 32), (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 32)
    third = _unshift(raw[..., :32], range(8), 1)  # [rows, blocks, 8, 32]
    lower = _unshift(raw[..., 96:104], (0, 4), 15).reshape(rows, blocks, 8, 2)
    upper = _unshift(raw[..., 104:108], (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 2)
    nibble = upper[..., 0] | (upper[..., 1] << 2)  # [rows, blocks, 8]
    words = mx.contiguous(nibble[..., 0::2] | (nibble[..., 1::2] << 4)).view(U16)  # [rows, blocks, 2]
    top = mx.concatenate([_bits(raw, 108, 110, U16), words], -1)
    return _fields(codes, 2, _AS_THEY_COME), _fields(third, 1, _BESIDE_TWOS), lower[..., 0] | (lower[..., 1] << 4), top


def _iq4_xs(raw: mx.array) -> Sequence[mx.array]:
    lower = _unshift(raw[..., 4:8], (0, 4), 15).swapaxes(-1, -2).reshape(*raw.shape[:2], 8)
    upper = _unshift(raw[..., 2:4], (0, 2, 4, 6), 3).swapaxes(-1, -2).reshape(*raw.shape[:2], 8)
    scale = ((lower | (upper << 4)) - 32).view(I8)
    return _bits(raw, 8, 136, U32), scale, _bits(raw, 0, 2, F16)


_NIBBLES, _BYTES, _TWO_BITS = Plane("codes", U32, 4), Plane("codes", U32, 8), Plane("codes", U32, 2)
_UPPER1, _UPPER2 = Plane("bits", U16, 2), Plane("bits", U32, 2)
_D, _DM = Plane("scale", F16, 1), Plane("scale", F16, 2)
_TOP_D, _TOP_DM = Plane("top", F16, 1, 256), Plane("top", F16, 2, 256)

LAYOUTS: Mapping[GGMLType, Layout] = {
    GGMLType.F32: Layout((Plane("codes", mx.float32, 1, 1),), _wide(mx.float32)),
    GGMLType.F16: Layout((Plane("codes", F16, 1, 1),), _wide(F16)),
    GGMLType.BF16: Layout((Plane("codes", mx.bfloat16, 1, 1),), _wide(mx.bfloat16)),
    GGMLType.Q4_0: Layout((_NIBBLES, _D), _block32(1, False)),
    GGMLType.Q4_1: Layout((_NIBBLES, _DM), _block32(2, False)),
    GGMLType.Q5_0: Layout((_NIBBLES, _UPPER1, _D), _block32(1, True)),
    GGMLType.Q5_1: Layout((_NIBBLES, _UPPER1, _DM), _block32(2, True)),
    GGMLType.Q8_0: Layout((_BYTES, _D), _q8_0),
    GGMLType.IQ4_NL: Layout((_NIBBLES, _D), _block32(1, False)),
    GGMLType.MXFP4: Layout((_NIBBLES, Plane("scale", U8, 1)), _mxfp4),
    GGMLType.Q2_K: Layout((_TWO_BITS, Plane("scale", U8, 2), _TOP_DM), _q2_k),
    GGMLType.Q3_K: Layout((_TWO_BITS, _UPPER1, Plane("scale", U8, 1), Plane("top", U16, 3, 256)), _q3_k),
    GGMLType.Q4_K: Layout((_NIBBLES, Plane("scale", U8, 2), _TOP_DM), _q4_k),
    GGMLType.Q5_K: Layout((_NIBBLES, _UPPER1, Plane("scale", U8, 2), _TOP_DM), _q5_k),
    GGMLType.Q6_K: Layout((_NIBBLES, _UPPER2, Plane("scale", I8, 2), _TOP_D), _q6_k),
    GGMLType.IQ4_XS: Layout((_NIBBLES, Plane("scale", I8, 1), _TOP_D), _iq4_xs),
}
"""How each native format lies on the device."""
