"""MXFP4: blocks of 32, codes of 4 bits in E2M1, a scale that is a power of two."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import fours, unshift
from quarrel.mlx_backend.formats.layout import NIBBLES, U8, BlockFormat, Plane


def _split(raw: mx.array) -> Sequence[mx.array]:
    codes = unshift(raw[..., 1:], (0, 4), 15)  # [rows, blocks, 2, 16]
    return fours(codes.reshape(*raw.shape[:2], 32)), raw[..., 0]


# 2^(e - 127), where the smallest is below the normal numbers.
_SCALES = """const uint e = uint(scale[at]);
    const float d = as_type<float>(e == 0u ? 0x00400000u : e << 23);
    return float4(d, d, 0.0f, 0.0f);"""

MXFP4 = BlockFormat(
    GGMLType.MXFP4,
    (NIBBLES, Plane("scale", U8, 1, 32, "uchar")),
    _split,
    part="fours(codes[pair], q);",
    scales=_SCALES,
    unit=1 << 14,
)
