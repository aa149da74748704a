"""Q5_K: 256 values in eight blocks, codes of 5 bits, 6-bit scales and minima of a float16 scale and minimum."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import FIFTH_BESIDE_NIBBLES, nibbles, scales_of_6_bits, unshift, view, words
from quarrel.mlx_backend.formats.layout import (
    BYTE_SCALE_AND_MIN,
    BYTE_SCALES,
    EXTRA_BIT,
    F16,
    NIBBLES,
    TOP_SCALE_AND_MIN,
    BlockFormat,
)


def _split(raw: mx.array) -> Sequence[mx.array]:
    codes = unshift(raw[..., 48:].reshape(*raw.shape[:2], 4, 32), (0, 4), 15)
    fifth = unshift(raw[..., 16:48], range(8), 1)  # [rows, blocks, 8, 32]
    fifth = words(fifth, 1, FIFTH_BESIDE_NIBBLES)
    return nibbles(codes), fifth, scales_of_6_bits(raw[..., 4:16]), view(raw, 0, 4, F16)


Q5_K = BlockFormat(
    GGMLType.Q5_K,
    (NIBBLES, EXTRA_BIT, BYTE_SCALES, TOP_SCALE_AND_MIN),
    _split,
    part="nibbles<1>(codes[pair], spread(bits[pair]), q);",
    scales=BYTE_SCALE_AND_MIN,
    offset=True,
)
