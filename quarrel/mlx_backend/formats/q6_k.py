"""Q6_K: 256 values in 16 runs, codes of 6 bits less 32, signed 8-bit scales, here 128 more, of a float16 scale."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import UPPER_BESIDE_NIBBLES, nibbles, unshift, view, words
from quarrel.mlx_backend.formats.layout import BYTE_SCALES, F16, NIBBLES, TOP_SCALE, U8, UPPER_BITS, BlockFormat


def _split(raw: mx.array) -> Sequence[mx.array]:
    rows, blocks, _ = raw.shape
    codes = unshift(raw[..., :128].reshape(rows, blocks, 2, 64), (0, 4), 15).reshape(rows, blocks, 8, 32)
    upper = unshift(raw[..., 128:192].reshape(rows, blocks, 2, 32), (0, 2, 4, 6), 3).reshape(rows, blocks, 8, 32)
    upper = words(upper, 2, UPPER_BESIDE_NIBBLES)
    return nibbles(codes), upper, mx.contiguous(raw[..., 192:208] ^ mx.array(0x80, U8)), view(raw, 208, 210, F16)


_SCALES = """const float d = float(top[whole]);
    const uchar2 s = scale[at];
    const float low = fma(float(as_type<half>(ushort(s.x))), ONE, -128.0f) * d;
    const float high = fma(float(as_type<half>(ushort(s.y))), ONE, -128.0f) * d;
    return float4(low * ONE, high * (ONE / 16), low * 32.0f, high * 32.0f);"""

Q6_K = BlockFormat(
    GGMLType.Q6_K,
    (NIBBLES, UPPER_BITS, BYTE_SCALES, TOP_SCALE),
    _split,
    part="nibbles<2>(codes[pair], bits[pair], q);",
    scales=_SCALES,
    offset=True,
)
