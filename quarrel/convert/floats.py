"""The number formats of a checkpoint, in float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quarrel.errors import ModelError


def float32(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Values of a safetensors type that NumPy may lack. 8-bit floats are without their scales."""
    if dtype == "BF16":
        widened: np.ndarray = (bits.astype(np.uint32) << 16).view(np.float32)
        return widened
    if dtype == "F8_E4M3":
        codes: np.ndarray = np.take(_E4M3, bits)
        return codes
    if dtype == "F8_E5M2":
        half: np.ndarray = (bits.astype(np.uint16) << 8).view(np.float16)
        return half.astype(np.float32)
    return bits.astype(np.float32, copy=False)


@dataclass(frozen=True)
class Scales:
    """Those of a tensor of 8-bit floats, `values`, and which of them each value takes: the number of its row plus that of
    its column, both in the tensor's shape, and neither as large as the tensor in memory. None: one for all."""

    values: np.ndarray
    numbers: tuple[np.ndarray, ...] | None


def scales_of(shape: tuple[int, ...], scale: np.ndarray, block: tuple[int, int], name: str) -> Scales:
    """A scale for all values [..., rows, k], for each row, or for each block of rows and columns; raises ModelError."""
    if scale.size == 1:
        return Scales(scale.reshape(-1), None)
    if len(shape) > 1:
        *outer, rows, k = shape
        down, across = -(-rows // block[0]), -(-k // block[1])
        if scale.shape == (*outer, down, across):
            of_rows = np.arange(math.prod(outer)).reshape(*outer, 1) * down + np.arange(rows) // block[0]
            numbers = (of_rows * across)[..., None], np.arange(k) // block[1]
            return Scales(scale.reshape(-1), tuple(np.broadcast_to(n.astype(np.int32), shape) for n in numbers))
        if scale.size * k == math.prod(shape):
            number = np.arange(scale.size, dtype=np.int32).reshape(*outer, rows, 1)
            return Scales(scale.reshape(-1), (np.broadcast_to(number, shape),))
    raise ModelError(f"the tensor {name} is {list(shape)}, with scales {list(scale.shape)} for blocks of {list(block)}")


def _e4m3() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    value[code & 127 == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


_E4M3 = _e4m3()
