"""Q4_1: blocks of 32, codes of 4 bits, a float16 scale and minimum. Weights that MLX quantised to 2 and 3 bits come as Q4_1
whose codes are below 4 and 8: their planes have no more bits than that."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.formats.fields import (
    IN_ORDER,
    THIRD_BESIDE_TWOS,
    nibbles_apart,
    scales_then_nibbles,
    words,
)
from quarrel.mlx_backend.formats.layout import (
    EXTRA_BIT,
    NIBBLES,
    NIBBLES_ONE,
    SCALE_AND_MIN,
    TWO_BITS,
    BlockFormat,
    FewerBits,
    Plane,
    scale_plus_min,
)


def _two_bits(nibbles: mx.array) -> Sequence[mx.array]:
    return (words(nibbles_apart(nibbles), 2, IN_ORDER),)


def _three_bits(nibbles: mx.array) -> Sequence[mx.array]:
    codes = nibbles_apart(nibbles)
    return words(codes & 3, 2, IN_ORDER), words(codes >> 2, 1, THIRD_BESIDE_TWOS)


_SPLIT, _SCALES = scales_then_nibbles(2), scale_plus_min(NIBBLES_ONE)


def _fewer(name: str, planes: tuple[Plane, ...], part: str) -> BlockFormat:
    planes = (*planes, SCALE_AND_MIN)
    return BlockFormat(GGMLType.Q4_1, planes, _SPLIT, part, _SCALES, offset=True, shared=True, odd=4, name=name)


Q4_1 = BlockFormat(
    GGMLType.Q4_1,
    (NIBBLES, SCALE_AND_MIN),
    _SPLIT,
    part="nibbles<0>(codes[pair], 0u, q);",
    scales=_SCALES,
    offset=True,
    shared=True,
    fewer=(
        FewerBits(_fewer("Q2_1", (TWO_BITS,), "twos<0>(codes[pair], 0u, q);"), 4, 0xCCCCCCCC, _two_bits),
        FewerBits(
            _fewer("Q3_1", (TWO_BITS, EXTRA_BIT), "twos<1>(codes[pair], spread(bits[pair]), q);"),
            4,
            0x88888888,
            _three_bits,
        ),
    ),
)
