"""Q5_0: blocks of 32, codes of 5 bits less 16, a float16 scale."""

from __future__ import annotations

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import scales_fifth_bits_nibbles
from quarrel.mlx_backend.formats.layout import EXTRA_BIT, NIBBLES, NIBBLES_ONE, SCALE, BlockFormat, scale_less

Q5_0 = BlockFormat(
    GGMLType.Q5_0,
    (NIBBLES, EXTRA_BIT, SCALE),
    scales_fifth_bits_nibbles(1),
    part="nibbles<1>(codes[pair], spread(bits[pair]), q);",
    scales=scale_less(16, NIBBLES_ONE),
    offset=True,
)
