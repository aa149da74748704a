"""Q4_0: blocks of 32, codes of 4 bits less 8, a float16 scale."""

from __future__ import annotations

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import scales_then_nibbles
from quarrel.mlx_backend.formats.layout import NIBBLES, ONE_SCALE, SCALE, BlockFormat

Q4_0 = BlockFormat(
    GGMLType.Q4_0,
    (NIBBLES, SCALE),
    scales_then_nibbles(1),
    part="nibbles<0, 8>(codes[pair], 0u, q);",
    scales=ONE_SCALE,
)
