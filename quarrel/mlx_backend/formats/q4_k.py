"""Q4_K: 256 values in eight blocks, codes of 4 bits, 6-bit scales and minima of a float16 scale and minimum.

Scales and minima stay 6 bits: a byte with the lower 4 of both, half a byte with the upper 2, so that a weight takes as many
bytes as in the file. A conversion of a byte costs as much as taking the four fields out does.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import in_six_bits, nibbles, scales_of_6_bits, unshift, view
from quarrel.mlx_backend.formats.layout import F16, NIBBLES, SIX_BITS, TOP_SCALE_AND_MIN, U8, BlockFormat, Plane

_SCALES = f"""const ushort low = ushort(lower[at]), high = ushort(upper[row * (K / 64) + (block >> 1)]);{SIX_BITS}
    const half2 d = top[whole];
    const float a = float(d.x) * (ONE * ONE) * six_a, m = float(d.y) * (ONE / 16) * six_m;
    return float4(a, a * 0.0625f, m, m);"""


def _split(raw: mx.array) -> Sequence[mx.array]:
    codes = unshift(raw[..., 16:].reshape(*raw.shape[:2], 4, 32), (0, 4), 15)  # [rows, blocks, 4, 2, 32]
    scales = scales_of_6_bits(raw[..., 4:16])
    return nibbles(codes), *in_six_bits(scales[..., 0], scales[..., 1]), view(raw, 0, 4, F16)


Q4_K = BlockFormat(
    GGMLType.Q4_K,
    (NIBBLES, Plane("lower", U8, 1, 32, "uchar"), Plane("upper", U8, 1, 64, "uchar"), TOP_SCALE_AND_MIN),
    _split,
    part="nibbles<0>(codes[pair], 0u, q);",
    scales=_SCALES,
    offset=True,
)
