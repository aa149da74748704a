"""Q8_1: blocks of 32, codes of 8 bits, a float16 scale and minimum."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import view
from quarrel.mlx_backend.formats.layout import BYTES_ONE, F16, SCALE_AND_MIN, U32, BlockFormat, scale_plus_min
from quarrel.mlx_backend.formats.q8_0 import BYTES


def _split(raw: mx.array) -> Sequence[mx.array]:
    return view(raw, 4, 36, U32), view(raw, 0, 4, F16)


Q8_1 = BlockFormat(
    GGMLType.Q8_1,
    (BYTES, SCALE_AND_MIN),
    _split,
    part="eights(codes[uint(at) * 4 + h], q);\n    eights(codes[uint(at) * 4 + 2 + h], q + 8);",
    scales=scale_plus_min(BYTES_ONE),
    offset=True,
    shared=True,
)
