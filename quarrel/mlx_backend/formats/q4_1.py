"""Q4_1: blocks of 32, codes of 4 bits, a float16 scale and minimum."""

from __future__ import annotations

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import scales_then_nibbles
from quarrel.mlx_backend.formats.layout import NIBBLES, NIBBLES_ONE, SCALE_AND_MIN, BlockFormat, scale_plus_min

Q4_1 = BlockFormat(
    GGMLType.Q4_1,
    (NIBBLES, SCALE_AND_MIN),
    scales_then_nibbles(2),
    part="nibbles<0>(codes[pair], 0u, q);",
    scales=scale_plus_min(NIBBLES_ONE),
    offset=True,
    shared=True,
)
