"""Q8_0: blocks of 32, signed codes of 8 bits, a float16 scale."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import view
from quarrel.mlx_backend.formats.layout import F16, ONE_SCALE, SCALE, U32, BlockFormat, Plane

BYTES = Plane("codes", U32, 8, 32, "uint2")


def _split(raw: mx.array) -> Sequence[mx.array]:
    return view(raw, 2, 34, U32), view(raw, 0, 2, F16)


Q8_0 = BlockFormat(
    GGMLType.Q8_0,
    (BYTES, SCALE),
    _split,
    part="eights<128>(codes[uint(at) * 4 + h], q);\n    eights<128>(codes[uint(at) * 4 + 2 + h], q + 8);",
    scales=ONE_SCALE,
)
