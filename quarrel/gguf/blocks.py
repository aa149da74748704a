"""What the bytes of a block mean: the one reference of every format, which kernels and tests are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from quarrel.errors import GGUFError
from quarrel.gguf.formats import FORMATS, GGMLType

# Blocks decoded at a time, so that the temporaries stay in the tens of megabytes whatever the tensor's size.
_CHUNK_ELEMENTS = 1 << 20


def dequantize(raw: np.ndarray, ggml_type: GGMLType) -> np.ndarray:
    """Values of raw blocks: uint8 [..., row_bytes] -> float32 [..., k], exactly as ggml computes them.

    Any bytes are legal content: scales may be NaN or infinite and the results then are too, without a warning.
    Raises GGUFError for raw that is not uint8 or holds no whole blocks, and for types that are never stored.
    """
    block = FORMATS[ggml_type]
    if raw.dtype != np.uint8 or raw.ndim < 1:
        raise GGUFError(
            f"{ggml_type.name} blocks come as a {raw.ndim}-d array of {raw.dtype}, wanted uint8 [..., row_bytes]"
        )
    if raw.shape[-1] % block.nbytes:
        raise GGUFError(
            f"a {ggml_type.name} row has {raw.shape[-1]} bytes, wanted a multiple of its block of {block.nbytes}"
        )
    if ggml_type is GGMLType.Q8_K:
        raise GGUFError(f"{ggml_type.name} is a format of activations, which no model file stores")
    decode = _decoder(ggml_type)
    blocks = np.ascontiguousarray(raw).reshape(-1, block.nbytes)
    out = np.empty((len(blocks), block.elements), np.float32)
    step = max(1, _CHUNK_ELEMENTS // block.elements)
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = decode(blocks[start : start + step])
    return out.reshape(*raw.shape[:-1], raw.shape[-1] // block.nbytes * block.elements)


def _decoder(kind: GGMLType) -> Callable[[np.ndarray], np.ndarray]:
    if kind in _OWN:
        return _OWN[kind]
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        return lambda blocks: blocks.view(dtype).astype(np.float32)
    from gguf import GGMLQuantizationType, quants  # only here, for it takes long

    foreign = GGMLQuantizationType(kind)
    return lambda blocks: quants.dequantize(blocks, foreign)


def _float16(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")  # [n, 128]
    d = _float16(blocks, 0)
    return np.where(signs, d, -d)


def _q2_0(blocks: np.ndarray) -> np.ndarray:
    codes = blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3  # [n, 16, 4], the lowest bits first
    return _float16(blocks, 0) * (codes.reshape(-1, 64).astype(np.float32) - 1)


def _ue4m3() -> np.ndarray:
    """float32 [256], what a scale byte of NVFP4 stands for: 4 bits of exponent, 3 of mantissa; the sign bit is ignored."""
    code = np.arange(256, dtype=np.uint8) & 0x7F
    exponent, mantissa = (code >> 3).astype(np.int32), (code & 7).astype(np.float32)
    power = np.exp2(np.maximum(exponent, 1) - 10.0).astype(np.float32)
    value: np.ndarray = np.where(exponent == 0, mantissa, 8 + mantissa) * power
    value[0x7F] = 0  # ggml's rule, which 0xFF does not share
    return value


def _nvfp4(blocks: np.ndarray) -> np.ndarray:
    scale = UE4M3[blocks[:, :4], None] * np.float32(0.5)  # [n, 4, 1]: E2M1 below is doubled
    codes = blocks[:, 4:].reshape(-1, 4, 8)
    values: np.ndarray = scale * _E2M1[np.concatenate([codes & 15, codes >> 4], axis=-1)]
    return values.reshape(-1, 64)


def _q8_1(blocks: np.ndarray) -> np.ndarray:
    values: np.ndarray = _float16(blocks, 0) * blocks[:, 4:].astype(np.float32) + _float16(blocks, 2)
    return values


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice the values
UE4M3 = _ue4m3()
_OWN: Mapping[GGMLType, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {GGMLType.BF16: _bf16, GGMLType.Q1_0: _q1_0, GGMLType.Q2_0: _q2_0, GGMLType.NVFP4: _nvfp4, GGMLType.Q8_1: _q8_1}
)
_PLAIN: Mapping[GGMLType, str] = MappingProxyType(
    {
        GGMLType.F32: "<f4",
        GGMLType.F16: "<f2",
        GGMLType.F64: "<f8",
        GGMLType.I8: "<i1",
        GGMLType.I16: "<i2",
        GGMLType.I32: "<i4",
        GGMLType.I64: "<i8",
    }
)
