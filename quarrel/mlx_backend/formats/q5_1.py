"""Q5_1: blocks of 32, codes of 5 bits, a float16 scale and minimum."""

from __future__ import annotations

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import scales_fifth_bits_nibbles
from quarrel.mlx_backend.formats.layout import EXTRA_BIT, NIBBLES, NIBBLES_ONE, SCALE_AND_MIN, BlockFormat, scale_plus_min

Q5_1 = BlockFormat(
    GGMLType.Q5_1,
    (NIBBLES, EXTRA_BIT, SCALE_AND_MIN),
    scales_fifth_bits_nibbles(2),
    part="nibbles<1>(codes[pair], spread(bits[pair]), q);",
    scales=scale_plus_min(NIBBLES_ONE),
    offset=True,
    shared=True,
)
