"""TQ1_0: 256 ternary values, five digits of base 3 in a byte, a float16 scale; stored as TQ2_0, 22% larger."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import IN_ORDER, view, words
from quarrel.mlx_backend.formats.layout import F16, TOP_SCALE, TWO_BITS, U8, BlockFormat
from quarrel.mlx_backend.formats.tq2_0 import ONE_TOP_SCALE, TERNARY


def _digits(raw: mx.array, start: int, stop: int, count: int) -> mx.array:
    """Codes `[..., count * bytes]`: the first digits of the bytes, then the second ones, ... The byte is digits / 243."""
    powers = mx.array([3**i for i in range(count)], U8)[:, None]
    shifted = (raw[..., None, start:stop] * powers).astype(mx.uint16)  # modulo 256, so that one digit is on top
    return ((shifted * 3) >> 8).astype(U8).reshape(*raw.shape[:2], -1)


def _split(raw: mx.array) -> Sequence[mx.array]:
    codes = mx.concatenate([_digits(raw, 0, 32, 5), _digits(raw, 32, 48, 5), _digits(raw, 48, 52, 4)], -1)
    return words(codes.reshape(*raw.shape[:2], 8, 32), 2, IN_ORDER), view(raw, 52, 54, F16)


TQ1_0 = BlockFormat(GGMLType.TQ1_0, (TWO_BITS, TOP_SCALE), _split, part=TERNARY, scales=ONE_TOP_SCALE, offset=True, odd=4)
