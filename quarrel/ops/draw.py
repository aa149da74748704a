"""Random inputs for cases: activations, and weights as raw blocks with sane scales."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops.contract import Array, RawWeight

NATIVE = tuple(
    GGMLType[name]
    for name in [
        "F32",
        "F16",
        "BF16",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
        "MXFP4",
    ]
)
"""Block formats that every backend computes with as they are; any other type is dequantised at load."""

# Where a block keeps its half-precision scales, and what spread of value a scale of one gives.
_SCALES: Mapping[GGMLType, tuple[tuple[int, float], ...]] = {
    GGMLType.Q4_0: ((0, 4.6),),
    GGMLType.Q4_1: ((0, 4.6), (2, -0.6)),
    GGMLType.Q5_0: ((0, 9.2),),
    GGMLType.Q5_1: ((0, 9.2), (2, -0.6)),
    GGMLType.Q8_0: ((0, 74.0),),
    GGMLType.Q2_K: ((80, 13.0), (82, 13.0)),
    GGMLType.Q3_K: ((108, 42.0),),
    GGMLType.Q4_K: ((0, 170.0), (2, 36.0)),
    GGMLType.Q5_K: ((0, 340.0), (2, 36.0)),
    GGMLType.Q6_K: ((208, 1360.0),),
    GGMLType.IQ4_NL: ((0, 67.0),),
    GGMLType.IQ4_XS: ((0, 1200.0),),
}


def activations(rng: np.random.Generator, *shape: int) -> Array:
    """float32, standard normal."""
    return rng.standard_normal(shape, dtype=np.float32)


def weight(rng: np.random.Generator, type: GGMLType, rows: int, k: int, std: float = 0.05) -> RawWeight:
    """Rows of `type` with values of about the given spread and every code in use."""
    if type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        dense = rng.standard_normal((rows, k), dtype=np.float32) * np.float32(std)
        return RawWeight(type, as_float_type(dense, type), k)
    block = FORMATS[type]
    raw = rng.integers(0, 256, (rows, k // block.elements, block.nbytes), dtype=np.uint8)
    if type == GGMLType.MXFP4:
        raw[..., 0] = rng.integers(117, 124, raw.shape[:2])
    for offset, spread in _SCALES.get(type, ()):
        scale = std / spread * rng.uniform(0.5, 1.5, raw.shape[:2])
        raw[..., offset : offset + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return RawWeight(type, raw.reshape(rows, -1), k)


def as_float_type(x: Array, type: GGMLType) -> Array:
    """float32 `[rows, k]` as the raw bytes of F32, F16 or BF16 (rounded to nearest even)."""
    if type == GGMLType.F32:
        return x.astype(np.float32).view(np.uint8)
    if type == GGMLType.F16:
        return x.astype(np.float16).view(np.uint8)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
