"""Q4_0: blocks of 32, codes of 4 bits less 8, a float16 scale."""

from __future__ import annotations

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import scales_then_nibbles
from quarrel.mlx_backend.formats.layout import NIBBLES, NIBBLES_ONE, SCALE, BlockFormat, scale_less

Q4_0 = BlockFormat(
    GGMLType.Q4_0,
    (NIBBLES, SCALE),
    scales_then_nibbles(1),
    part="nibbles<0>(codes[pair], 0u, q);",
    scales=scale_less(8, NIBBLES_ONE),
    offset=True,
)
