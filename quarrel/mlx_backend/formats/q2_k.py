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
    return float4(float(d.x) * float(s.x & 15), float(d.x) * float(s.y & 15),
                  float(d.y) * float(s.x >> 4), float(d.y) * float(s.y >> 4));"""

Q2_K = BlockFormat(
    GGMLType.Q2_K,
    (TWO_BITS, BYTE_SCALES, TOP_SCALE_AND_MIN),
    _split,
    part="twos<0, 0>(codes[pair], 0u, q);",
    scales=_SCALES,
    offset=True,
)
