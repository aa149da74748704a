"""Q3_K: 256 values in 16 runs, codes of 3 bits less 4, 6-bit scales less 32 of a float16 scale."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import IN_ORDER, THIRD_BESIDE_TWOS, in_six_bits, unshift, view, words
from quarrel.mlx_backend.formats.layout import EXTRA_BIT, SIX_BITS, TWO_BITS, U8, U16, BlockFormat, Plane


def _split(raw: mx.array) -> Sequence[mx.array]:
    rows, blocks, _ = raw.shape
    codes = unshift(raw[..., 32:96].reshape(rows, blocks, 2, 32), (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 32)
    third = unshift(raw[..., :32], range(8), 1)  # [rows, blocks, 8, 32]
    lower = unshift(raw[..., 96:104], (0, 4), 15).reshape(rows, blocks, 8, 2)
    upper = unshift(raw[..., 104:108], (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 2)
    a, m = (lower[..., i] | (upper[..., i] << 4) for i in (0, 1))
    lowers, uppers = in_six_bits(a, m)
    top = mx.concatenate([view(raw, 108, 110, U16), uppers.view(U16)], -1)
    return words(codes, 2, IN_ORDER), words(third, 1, THIRD_BESIDE_TWOS), lowers, top


# Six bytes of 256 values: the scale, then the upper two bits of the sixteen 6-bit scales. With a plane of their own, four
# maps would not fit into a launch.
_SCALES = f"""const int over = whole * 6;
    const ushort low = ushort(scale[at]), high = ushort(top[over + 2 + (block >> 1 & 3)]);{SIX_BITS}
    const float d = float(*(device const half*)(top + over));
    const float a = d * fma(six_a, ONE, -32.0f), m = d * fma(six_m, ONE / 16, -32.0f);
    return float4(a * ONE, m * (ONE / 16), a * 4.0f, m * 4.0f);"""

Q3_K = BlockFormat(
    GGMLType.Q3_K,
    (TWO_BITS, EXTRA_BIT, Plane("scale", U8, 1, 32, "uchar"), Plane("top", U16, 3, 256, "uchar")),
    _split,
    part="twos<1>(codes[pair], spread(bits[pair]), q);",
    scales=_SCALES,
    offset=True,
    odd=4,
)
