"""Q8_0: blocks of 32, signed codes of 8 bits, here 128 more, a float16 scale."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import view
from quarrel.mlx_backend.formats.layout import BYTES_ONE, F16, SCALE, U8, U32, BlockFormat, Plane, scale_less

BYTES = Plane("codes", U32, 8, 32, "uint2")


def _split(raw: mx.array) -> Sequence[mx.array]:
    codes = raw[..., 2:34] ^ mx.array(0x80, U8)
    return mx.contiguous(codes).view(U32), view(raw, 0, 2, F16)


Q8_0 = BlockFormat(
    GGMLType.Q8_0,
    (BYTES, SCALE),
    _split,
    part="eights(codes[uint(at) * 4 + h], q);\n    eights(codes[uint(at) * 4 + 2 + h], q + 8);",
    scales=scale_less(128, BYTES_ONE),
    offset=True,
)
