"""Q2_K: 256 values in 16 runs, codes of 2 bits, 4-bit scales and minima of a float16 scale and minimum."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import IN_ORDER, unshift, view, words
from quarrel.mlx_backend.formats.layout import BYTE_SCALES, F16, TOP_SCALE_AND_MIN, TWO_BITS, BlockFormat


def _split(raw: mx.array) -> Sequence[mx.array]:
    codes = unshift(raw[..., 16:80].reshape(*raw.shape[:2], 2, 32), (0, 2, 4, 6), 3)  # [rows, blocks, 2, 4, 32]
    return words(codes, 2, IN_ORDER), raw[..., :16], view(raw, 80, 84, F16)


_SCALES = """const half2 d = top[whole];
    const uchar2 s = scale[at];
    const float a = float(d.x) * (ONE * ONE), m = float(d.y) * (ONE / 16);
    return float4(a * float(as_type<half>(ushort(s.x & 15))), a * 0.0625f * float(as_type<half>(ushort(s.y & 15))),
                  m * float(as_type<half>(ushort(s.x & 240))), m * float(as_type<half>(ushort(s.y & 240))));"""

Q2_K = BlockFormat(
    GGMLType.Q2_K,
    (TWO_BITS, BYTE_SCALES, TOP_SCALE_AND_MIN),
    _split,
    part="twos<0>(codes[pair], 0u, q);",
    scales=_SCALES,
    offset=True,
    odd=4,
)
