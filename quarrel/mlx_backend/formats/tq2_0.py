"""TQ2_0: 256 ternary values, codes of 2 bits less 1, a float16 scale."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import IN_ORDER, unshift, view, words
from quarrel.mlx_backend.formats.layout import F16, TOP_SCALE, TWO_BITS, BlockFormat


def _split(raw: mx.array) -> Sequence[mx.array]:
    codes = unshift(raw[..., :64].reshape(*raw.shape[:2], 2, 32), (0, 2, 4, 6), 3)  # [rows, blocks, 2, 4, 32]
    return words(codes, 2, IN_ORDER), view(raw, 64, 66, F16)


TERNARY = "twos<0>(codes[pair], 0u, q);"
ONE_TOP_SCALE = "const float d = float(top[whole]);\n    return float4(d * ONE, d * (ONE / 16), d, d);"

TQ2_0 = BlockFormat(GGMLType.TQ2_0, (TWO_BITS, TOP_SCALE), _split, part=TERNARY, scales=ONE_TOP_SCALE, offset=True, odd=4)
