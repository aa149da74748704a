"""The block formats that the contracts cover: every op that reads weights has cases in each.

A backend has kernels for a format or converts it when it loads; its result is compared with the same reference either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quarrel.gguf import GGMLType


@dataclass(frozen=True)
class Scale:
    """How a random block gets a sane scale at byte `offset`.

    A float16, where a scale of one gives values a standard deviation of `spread`; or, with `codes`, a byte below the second
    number and not below the first, for scales that are not float16.
    """

    offset: int
    spread: float = 1.0
    codes: tuple[int, int] | None = None


BLOCK_SCALES: Mapping[GGMLType, tuple[Scale, ...]] = {
    GGMLType.F32: (),
    GGMLType.F16: (),
    GGMLType.BF16: (),
    GGMLType.Q4_0: (Scale(0, 4.6),),
    GGMLType.Q4_1: (Scale(0, 4.6), Scale(2, -0.6)),
    GGMLType.Q5_0: (Scale(0, 9.2),),
    GGMLType.Q5_1: (Scale(0, 9.2), Scale(2, -0.6)),
    GGMLType.Q8_0: (Scale(0, 74.0),),
    GGMLType.Q8_1: (Scale(0, 74.0), Scale(2, -0.58)),
    GGMLType.Q2_K: (Scale(80, 13.0), Scale(82, 13.0)),
    GGMLType.Q3_K: (Scale(108, 42.0),),
    GGMLType.Q4_K: (Scale(0, 170.0), Scale(2, 36.0)),
    GGMLType.Q5_K: (Scale(0, 340.0), Scale(2, 36.0)),
    GGMLType.Q6_K: (Scale(208, 1360.0),),
    GGMLType.IQ4_NL: (Scale(0, 67.0),),
    GGMLType.IQ4_XS: (Scale(0, 1200.0),),
    GGMLType.MXFP4: (Scale(0, codes=(117, 124)),),
    GGMLType.NVFP4: tuple(Scale(i, codes=(4, 15)) for i in range(4)),
    GGMLType.TQ2_0: (Scale(64, 1.2),),
}
"""Where a block of each format has its scales."""

WEIGHT_TYPES: tuple[GGMLType, ...] = tuple(BLOCK_SCALES)
"""The formats that cases are made for."""
