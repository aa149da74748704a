"""Random inputs for cases: activations, and weights as raw blocks with sane scales."""

from __future__ import annotations

import numpy as np

from quarrel.gguf import FORMATS, GGMLType, quantize
from quarrel.ops.contract import Array, RawWeight
from quarrel.ops.formats import BLOCK_SCALES


def activations(rng: np.random.Generator, *shape: int) -> Array:
    """float32, standard normal."""
    return rng.standard_normal(shape, dtype=np.float32)


def weight(rng: np.random.Generator, type: GGMLType, rows: int, k: int, std: float = 0.05) -> RawWeight:
    """Rows of `type` with values of about the given spread and every code in use."""
    if type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
        dense = rng.standard_normal((rows, k), dtype=np.float32) * np.float32(std)
        return RawWeight(type, quantize(dense, type), k)
    block = FORMATS[type]
    raw = rng.integers(0, 256, (rows, k // block.elements, block.nbytes), dtype=np.uint8)
    for scale in BLOCK_SCALES.get(type, ()):
        if scale.codes is not None:
            raw[..., scale.offset] = rng.integers(*scale.codes, raw.shape[:2])
            continue
        value = std / scale.spread * rng.uniform(0.5, 1.5, raw.shape[:2])
        raw[..., scale.offset : scale.offset + 2] = value.astype(np.float16)[..., None].view(np.uint8)
    return RawWeight(type, raw.reshape(rows, -1), k)


def small_codes(weight: RawWeight, bits: int) -> RawWeight:
    """A weight in Q4_1 or Q8_1 whose codes have so many bits, as those that MLX quantised to 2, 3 or 6."""
    raw = weight.raw.reshape(len(weight.raw), -1, FORMATS[weight.type].nbytes).copy()
    raw[..., 4:] &= ((1 << bits) - 1) * (0x11 if weight.type == GGMLType.Q4_1 else 1)
    return RawWeight(weight.type, raw.reshape(weight.raw.shape), weight.k)
