"""Q8_1: blocks of 32, codes of 8 bits, a float16 scale and minimum. Weights that MLX quantised to 6 bits come as Q8_1 whose
codes are below 64: their planes have no more bits than that."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import UPPER_BESIDE_NIBBLES, nibbles, view, words
from quarrel.mlx_backend.formats.layout import (
    BYTES_ONE,
    F16,
    NIBBLES,
    NIBBLES_ONE,
    SCALE_AND_MIN,
    U8,
    U32,
    UPPER_BITS,
    BlockFormat,
    FewerBits,
    scale_plus_min,
)
from quarrel.mlx_backend.formats.q8_0 import BYTES


def _split(raw: mx.array) -> Sequence[mx.array]:
    return view(raw, 4, 36, U32), view(raw, 0, 4, F16)


def _six_bits(eights: mx.array) -> Sequence[mx.array]:
    codes = mx.contiguous(eights).view(U8)
    return nibbles(codes & 15), words(codes >> 4, 2, UPPER_BESIDE_NIBBLES)


_Q6_1 = BlockFormat(
    GGMLType.Q8_1,
    (NIBBLES, UPPER_BITS, SCALE_AND_MIN),
    _split,
    part="nibbles<2>(codes[pair], bits[pair], q);",
    scales=scale_plus_min(NIBBLES_ONE),
    offset=True,
    shared=True,
    name="Q6_1",
)
Q8_1 = BlockFormat(
    GGMLType.Q8_1,
    (BYTES, SCALE_AND_MIN),
    _split,
    part="eights(codes[uint(at) * 4 + h], q);\n    eights(codes[uint(at) * 4 + 2 + h], q + 8);",
    scales=scale_plus_min(BYTES_ONE),
    offset=True,
    shared=True,
    fewer=(FewerBits(_Q6_1, BYTES.count, 0xC0C0C0C0, _six_bits),),
)
