"""IQ4_NL: blocks of 32, codes of 4 bits that stand for 16 uneven values (`bent` in codes.py), a float16 scale."""

from __future__ import annotations

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import scales_then_nibbles
from quarrel.mlx_backend.formats.layout import NIBBLES, ONE_SCALE, SCALE, BlockFormat

IQ4_NL = BlockFormat(
    GGMLType.IQ4_NL, (NIBBLES, SCALE), scales_then_nibbles(1), part="bent(codes[pair], q);", scales=ONE_SCALE
)
