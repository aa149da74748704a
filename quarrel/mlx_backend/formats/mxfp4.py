"""MXFP4: blocks of 32, codes of 4 bits in E2M1, a scale that is a power of two."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import view
from quarrel.mlx_backend.formats.layout import NIBBLES, U8, U32, BlockFormat, Plane


def _split(raw: mx.array) -> Sequence[mx.array]:
    return view(raw, 1, 17, U32), raw[..., 0]


# 2^(e - 128), where the two smallest are below the normal numbers.
_SCALES = """const uint e = uint(scale[at]);
    const float d = as_type<float>(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
    return float4(d, d, 0.0f, 0.0f);"""

MXFP4 = BlockFormat(
    GGMLType.MXFP4,
    (NIBBLES, Plane("scale", U8, 1, 32, "uchar")),
    _split,
    part="fours(codes[pair], q);",
    scales=_SCALES,
)
