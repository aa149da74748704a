"""Floats into blocks, for tools and export. The K formats search their scales; the others follow the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from quarrel.errors import GGUFError
from quarrel.gguf.encoders import SEARCHED, WEIGHTED, Encoder, error_weights
from quarrel.gguf.formats import FORMATS, GGMLType
from quarrel.gguf.grids import GRIDS

# Quantised at a time: a search holds about ten float arrays of this many elements, 15 MB. With 1 << 20 Q4_K took 1.6 times
# as long and Q6_K 1.25 (a thread of a Zen 3), and 59 MB; with 1 << 16 it is 8 % less, but calls of NumPy become so short
# that 16 threads would wait for each other.
_CHUNK_ELEMENTS = 1 << 18

LEAST = 1e-4
"""Of the mean importance of a row, which every column has at least."""
_LARGEST: Mapping[GGMLType, int] = MappingProxyType({GGMLType.NVFP4: 6 * 448})
"""The largest value that a block holds, if it is not float16's largest scale."""

_FOREIGN = frozenset(
    {
        GGMLType.Q8_0,
        GGMLType.Q4_0,
        GGMLType.Q4_1,
        GGMLType.Q5_0,
        GGMLType.Q5_1,
        GGMLType.MXFP4,
        GGMLType.TQ1_0,
        GGMLType.TQ2_0,
    }
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


def quantize(x: np.ndarray, ggml_type: GGMLType, importance: np.ndarray | None = None) -> np.ndarray:
    """Raw blocks of finite values: float32 [..., k] -> uint8 [..., row_bytes].

    importance: how much an error in each column weighs, [k] or one for each row [..., k], at least 0; types that have no
    choice (plain ones, Q8_0, MXFP4, ...) pass over it.

    Takes the plain types, BF16, Q8_0, Q8_1, Q4_0, Q4_1, Q5_0, Q5_1, MXFP4, NVFP4, TQ1_0, TQ2_0, Q2_K to Q6_K, IQ1 to IQ4.
    Raises GGUFError for other types, for rows that are not whole blocks, for importance that does not fit or is negative or
    not finite, and for values that no block can hold: NaN, and beyond 65504, where float16 scales end (NVFP4: beyond 2688).
    """
    block = FORMATS[ggml_type]
    if x.ndim < 1 or x.shape[-1] % block.elements:
        raise GGUFError(f"{ggml_type.name} rows are multiples of {block.elements} elements, got shape {list(x.shape)}")
    if ggml_type in _PLAIN:
        with np.errstate(over="ignore"):
            plain = np.ascontiguousarray(x, _PLAIN[ggml_type])
        return plain.view(np.uint8).reshape(*x.shape[:-1], x.shape[-1] * block.nbytes)
    if ggml_type is GGMLType.BF16:
        return _bf16(np.ascontiguousarray(x, np.float32))
    encode = _encoder(ggml_type, importance is not None)
    rows = np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])
    largest = _LARGEST.get(ggml_type, 65504)
    if not (np.abs(rows) <= largest).all():
        raise GGUFError(f"{ggml_type.name} holds values up to {largest}, but the array has NaN or larger ones")
    weights = None if importance is None else _weights(rows, importance, x.shape, ggml_type)
    blocks = rows.reshape(-1, block.elements)
    out = np.empty((len(blocks), block.nbytes), np.uint8)
    step = max(1, _CHUNK_ELEMENTS // block.elements)
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            out[part] = encode(blocks[part], None if weights is None else weights[part])
    return out.reshape(*x.shape[:-1], x.shape[-1] // block.elements * block.nbytes)


def _weights(rows: np.ndarray, importance: np.ndarray, shape: tuple[int, ...], kind: GGMLType) -> np.ndarray | None:
    """Of blocks, how much an error of each value weighs; None where the type has no choice."""
    if importance.shape not in (shape, shape[-1:]):
        raise GGUFError(f"importance {list(importance.shape)} does not fit weights {list(shape)}")
    if not (np.isfinite(importance).all() and (importance >= 0).all()):
        raise GGUFError("importance holds NaN, infinite or negative values, which weigh nothing")
    if kind not in (*SEARCHED, *GRIDS, *WEIGHTED):
        return None
    each = importance.reshape(-1, shape[-1]).astype(np.float64)
    # Of the largest, so that no square or sum of them leaves float32.
    each = (each / np.maximum(each.max(-1, keepdims=True), np.finfo(np.float64).tiny)).astype(np.float32)
    # What no text ever used must not become zero: another text may.
    each = np.maximum(each, LEAST * each.mean(-1, keepdims=True))
    return error_weights(rows, np.where(each.sum(-1, keepdims=True) > 0, each, 1), kind).reshape(-1, FORMATS[kind].elements)


def _encoder(kind: GGMLType, weighted: bool) -> Encoder:
    if kind is GGMLType.Q8_1:
        return lambda blocks, importance: _q8_1(blocks)
    if kind in SEARCHED:
        return SEARCHED[kind]
    if kind in GRIDS:
        return GRIDS[kind]
    if kind in WEIGHTED and weighted:
        return WEIGHTED[kind]
    if kind in _FOREIGN:
        from gguf import GGMLQuantizationType, quants  # only here, for it takes long

        foreign = GGMLQuantizationType(kind)
        return lambda blocks, importance: quants.quantize(blocks, foreign)
    known = ", ".join(t.name for t in (*_PLAIN, GGMLType.BF16, GGMLType.Q8_1, *sorted(_FOREIGN), *SEARCHED, *GRIDS))
    raise GGUFError(f"there is no quantiser for {kind.name} here, only for {known}")


def _q8_1(blocks: np.ndarray) -> np.ndarray:
    """A float16 scale and minimum, bytes in 255 steps."""
    low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    m, d = low.astype("<f2"), ((high - low) / 255).astype("<f2")
    step = d.astype(np.float32)
    codes = np.rint((blocks - m.astype(np.float32)) / np.where(step > 0, step, 1)).clip(0, 255).astype(np.uint8)
    return np.concatenate([d.view(np.uint8), m.view(np.uint8), codes], -1)


def _bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    even = bits + (0x7FFF + (bits >> 16 & 1))  # rounds to nearest, ties to even
    quiet = np.where(np.isnan(x), bits | 1 << 22, even)
    raw: np.ndarray = (quiet >> 16).astype("<u2").view(np.uint8)
    return raw
