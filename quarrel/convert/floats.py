"""The number formats of a checkpoint, in float32."""

from __future__ import annotations

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


def scaled(values: np.ndarray, scale: np.ndarray, block: tuple[int, int], name: str) -> np.ndarray:
    """Values [..., rows, k], in place, times a scale for all, for each row, or for each block of rows and columns."""
    if scale.size == 1:
        values *= scale.reshape(())
        return values
    rows, k = values.shape[-2:] if values.ndim > 1 else (0, 0)
    blocks = (-(-rows // block[0]), -(-k // block[1]))
    if values.ndim > 1 and scale.shape == (*values.shape[:-2], *blocks):
        rowwise = np.repeat(scale, block[0], -2)[..., :rows, :]
        for i in range(blocks[1]):
            values[..., i * block[1] : (i + 1) * block[1]] *= rowwise[..., i : i + 1]
        return values
    if scale.size * k == values.size:
        values *= scale.reshape(*values.shape[:-1], 1)
        return values
    raise ModelError(
        f"the tensor {name} is {list(values.shape)}, with scales {list(scale.shape)} for blocks of {list(block)}"
    )


def _e4m3() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    value[code & 127 == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


_E4M3 = _e4m3()
