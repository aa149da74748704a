"""NVFP4: 64 values in four runs of 16, codes of 4 bits in E2M1, a scale in unsigned E4M3 for each run."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import fours, unshift
from quarrel.mlx_backend.formats.layout import BYTE_SCALES, NIBBLES, BlockFormat


def _split(raw: mx.array) -> Sequence[mx.array]:
    rows, blocks, _ = raw.shape
    codes = unshift(raw[..., 4:36].reshape(rows, blocks, 4, 8), (0, 4), 15)  # [rows, blocks, 4, 2, 8]
    return fours(codes.reshape(rows, blocks * 2, 32)), raw[..., :4]


# The bits of E4M3 are those of a half whose exponent is 8 too small. 127 is not a number and counts as 0.
_SCALES = """const uchar2 s = scale[at];
    const ushort low = s.x == 127u ? 0u : (s.x & 127u) << 7, high = s.y == 127u ? 0u : (s.y & 127u) << 7;
    return float4(float(as_type<half>(low)) * 256.0f, float(as_type<half>(high)) * 256.0f, 0.0f, 0.0f);"""

NVFP4 = BlockFormat(
    GGMLType.NVFP4,
    (NIBBLES, BYTE_SCALES),
    _split,
    part="fours(codes[pair], q);",
    scales=_SCALES,
    unit=1 << 14,
)
