"""Q3_K: 256 values in 16 runs, codes of 3 bits less 4, 6-bit scales less 32 of a float16 scale."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import IN_ORDER, THIRD_BESIDE_TWOS, unshift, view, words
from quarrel.mlx_backend.formats.layout import EXTRA_BIT, TWO_BITS, U8, U16, BlockFormat, Plane


def _split(raw: mx.array) -> Sequence[mx.array]:
    rows, blocks, _ = raw.shape
    codes = unshift(raw[..., 32:96].reshape(rows, blocks, 2, 32), (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 32)
    third = unshift(raw[..., :32], range(8), 1)  # [rows, blocks, 8, 32]
    lower = unshift(raw[..., 96:104], (0, 4), 15).reshape(rows, blocks, 8, 2)
    upper = unshift(raw[..., 104:108], (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 2)
    nibble = upper[..., 0] | (upper[..., 1] << 2)  # [rows, blocks, 8]
    uppers = mx.contiguous(nibble[..., 0::2] | (nibble[..., 1::2] << 4)).view(U16)  # [rows, blocks, 2]
    top = mx.concatenate([view(raw, 108, 110, U16), uppers], -1)
    return words(codes, 2, IN_ORDER), words(third, 1, THIRD_BESIDE_TWOS), lower[..., 0] | (lower[..., 1] << 4), top


# `top` is the scale, then the upper two bits of the sixteen 6-bit scales, a nibble for each block.
_SCALES = """const int over = whole * 3, b = at & 7;
    const float d = float(as_type<half>(top[over]));
    const uint upper = uint(top[over + 1 + (b >> 2)]) >> uint((b & 3) * 4), lower = uint(scale[at]);
    const int low = int((lower & 15u) | (upper & 3u) << 4) - 32, high = int(lower >> 4 | (upper & 12u) << 2) - 32;
    return float4(d * float(low), d * float(high), 0.0f, 0.0f);"""

Q3_K = BlockFormat(
    GGMLType.Q3_K,
    (TWO_BITS, EXTRA_BIT, Plane("scale", U8, 1, 32, "uchar"), Plane("top", U16, 3, 256, "ushort")),
    _split,
    part="twos<1, 4>(codes[pair], spread(bits[pair]), q);",
    scales=_SCALES,
)
