"""Q5_1: blocks of 32, codes of 5 bits, a float16 scale and minimum."""

from __future__ import annotations

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import scales_fifth_bits_nibbles
from quarrel.mlx_backend.formats.layout import EXTRA_BIT, NIBBLES, SCALE_AND_MIN, SCALE_PLUS_MIN, BlockFormat

Q5_1 = BlockFormat(
    GGMLType.Q5_1,
    (NIBBLES, EXTRA_BIT, SCALE_AND_MIN),
    scales_fifth_bits_nibbles(2),
    part="nibbles<1, 0>(codes[pair], spread(bits[pair]), q);",
    scales=SCALE_PLUS_MIN,
    offset=True,
)
