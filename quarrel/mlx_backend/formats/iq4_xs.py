"""IQ4_XS: 256 values in eight blocks, codes as those of IQ4_NL, 6-bit scales less 32 of a float16 scale."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import unshift, view
from quarrel.mlx_backend.formats.layout import F16, NIBBLES, TOP_SCALE, U8, U32, BlockFormat, Plane


def _split(raw: mx.array) -> Sequence[mx.array]:
    lower = unshift(raw[..., 4:8], (0, 4), 15).swapaxes(-1, -2).reshape(*raw.shape[:2], 8)
    upper = unshift(raw[..., 2:4], (0, 2, 4, 6), 3).swapaxes(-1, -2).reshape(*raw.shape[:2], 8)
    scale = lower | (upper << 4)
    return view(raw, 8, 136, U32), scale, view(raw, 0, 2, F16)


IQ4_XS = BlockFormat(
    GGMLType.IQ4_XS,
    (NIBBLES, Plane("scale", U8, 1, 32, "uchar"), TOP_SCALE),
    _split,
    part="bent(codes[pair], q);",
    scales="""const float s = fma(float(as_type<half>(ushort(scale[at]))), ONE, -32.0f), d = float(top[whole]) * s;
    return float4(d, d, 0.0f, 0.0f);""",
)
