"""Q4_K: 256 values in eight blocks, codes of 4 bits, 6-bit scales and minima of a float16 scale and minimum."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import nibbles, scales_of_6_bits, unshift, view
from quarrel.mlx_backend.formats.layout import BYTE_SCALE_AND_MIN, BYTE_SCALES, F16, NIBBLES, TOP_SCALE_AND_MIN, BlockFormat


def _split(raw: mx.array) -> Sequence[mx.array]:
    codes = unshift(raw[..., 16:].reshape(*raw.shape[:2], 4, 32), (0, 4), 15)  # [rows, blocks, 4, 2, 32]
    return nibbles(codes), scales_of_6_bits(raw[..., 4:16]), view(raw, 0, 4, F16)


Q4_K = BlockFormat(
    GGMLType.Q4_K,
    (NIBBLES, BYTE_SCALES, TOP_SCALE_AND_MIN),
    _split,
    part="nibbles<0, 0>(codes[at * 2 + h], 0u, q);",
    scales=BYTE_SCALE_AND_MIN,
    offset=True,
)
