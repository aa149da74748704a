"""Floats into blocks, for tools and export. The K formats search their scales; the others follow the gguf package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from quarrel.errors import GGUFError
from quarrel.gguf.blocks import UE4M3
from quarrel.gguf.formats import FORMATS, GGMLType

# Blocks quantised at a time: the search holds about ten float arrays of this many elements.
_CHUNK_ELEMENTS = 1 << 20

REFITS = 2
"""Of weights on a grid of 4 bits the mean squared error was 1.02 to 1.03 of llama.cpp's without in Q4_K, is 0.99 with two;
0.93 in Q5_K, which was 1.07 with the offsets that llama.cpp has, from -0.5 to 0.9."""

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


def quantize(x: np.ndarray, ggml_type: GGMLType) -> np.ndarray:
    """Raw blocks of finite values: float32 [..., k] -> uint8 [..., row_bytes].

    Takes the plain types, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, MXFP4, NVFP4, TQ1_0, TQ2_0, Q4_K, Q5_K and Q6_K. Raises
    GGUFError for other types, for rows that are not whole blocks, and for values that no block can hold: NaN, and beyond
    65504, where float16 scales end (NVFP4: beyond 2688).
    """
    block = FORMATS[ggml_type]
    if x.ndim < 1 or x.shape[-1] % block.elements:
        raise GGUFError(f"{ggml_type.name} rows are multiples of {block.elements} elements, got shape {list(x.shape)}")
    if ggml_type in _PLAIN:
        plain = np.ascontiguousarray(x, _PLAIN[ggml_type])
        return plain.view(np.uint8).reshape(*x.shape[:-1], x.shape[-1] * block.nbytes)
    if ggml_type is GGMLType.BF16:
        return _bf16(np.ascontiguousarray(x, np.float32))
    encode = _encoder(ggml_type)
    blocks = np.ascontiguousarray(x, np.float32).reshape(-1, block.elements)
    largest = _LARGEST.get(ggml_type, 65504)
    if not (np.abs(blocks) <= largest).all():
        raise GGUFError(f"{ggml_type.name} holds values up to {largest}, but the array has NaN or larger ones")
    out = np.empty((len(blocks), block.nbytes), np.uint8)
    step = max(1, _CHUNK_ELEMENTS // block.elements)
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = encode(blocks[start : start + step])
    return out.reshape(*x.shape[:-1], x.shape[-1] // block.elements * block.nbytes)


def _encoder(kind: GGMLType) -> Callable[[np.ndarray], np.ndarray]:
    if kind in _SEARCHED:
        return _SEARCHED[kind]
    if kind in _FOREIGN:
        from gguf import GGMLQuantizationType, quants  # only here, for it takes long

        foreign = GGMLQuantizationType(kind)
        return lambda blocks: quants.quantize(blocks, foreign)
    known = ", ".join(t.name for t in (*_PLAIN, GGMLType.BF16, *sorted(_FOREIGN), *_SEARCHED))
    raise GGUFError(f"there is no quantiser for {kind.name} here, only for {known}")


def _bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    even = bits + (0x7FFF + (bits >> 16 & 1))  # rounds to nearest, ties to even
    quiet = np.where(np.isnan(x), bits | 1 << 22, even)
    raw: np.ndarray = (quiet >> 16).astype("<u2").view(np.uint8)
    return raw


def _float16(x: np.ndarray) -> np.ndarray:
    """Rounds to float16 and back: later steps must see the scale that the file will hold."""
    return x.astype(np.float16).astype(np.float32)


def _reciprocal(x: np.ndarray) -> np.ndarray:
    inverse: np.ndarray = np.divide(1, x, out=np.zeros_like(x), where=x != 0)
    return inverse


def _affine(x: np.ndarray, levels: int, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and (negated) minimum of each run: x [n, runs, 32] -> two arrays [n, runs], all >= 0, for
    x ~ scale * q - minimum with q in 0..levels.

    Each offset stretches the range a little and gives integers q; the weighted least squares line through (q, x) is a
    candidate, and the candidate with the least weighted error wins. Large values weigh more.
    """
    weight = np.abs(x) + np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    low = np.minimum(x.min(-1, keepdims=True), 0)
    spread = x.max(-1, keepdims=True) - low
    total, sum_x = weight.sum(-1), (weight * x).sum(-1)

    best_scale, best_low = spread[..., 0] / levels, low[..., 0]
    fit = best_scale[..., None] * np.clip(np.rint((x - low) * _reciprocal(best_scale[..., None])), 0, levels) + low
    best_error = (weight * (fit - x) ** 2).sum(-1)
    for offset in offsets:
        q = np.clip(np.rint((x - low) * ((levels + offset) * _reciprocal(spread))), 0, levels)
        weighted = weight * q
        sum_q, sum_qq, sum_qx = weighted.sum(-1), (weighted * q).sum(-1), (weighted * x).sum(-1)
        determinant = total * sum_qq - sum_q * sum_q
        usable = determinant > 0
        inverse = np.divide(1, determinant, out=np.zeros_like(determinant), where=usable)
        scale = (total * sum_qx - sum_x * sum_q) * inverse
        bottom = (sum_qq * sum_x - sum_q * sum_qx) * inverse
        # The format can only subtract: a line that would start above zero is fitted again through zero.
        above = bottom > 0
        scale = np.where(above, sum_qx * _reciprocal(sum_qq), scale)
        bottom = np.where(above, 0, bottom)
        error = (weight * (scale[..., None] * q + bottom[..., None] - x) ** 2).sum(-1)
        better = usable & (error < best_error)
        best_scale = np.where(better, scale, best_scale)
        best_low = np.where(better, bottom, best_low)
        best_error = np.where(better, error, best_error)
    return best_scale, -best_low


def _packed(d: np.ndarray, dmin: np.ndarray, s: np.ndarray, m: np.ndarray) -> np.ndarray:
    """The 16 first bytes of a Q4_K or Q5_K block: units [n, 1], and the scales and minima [n, 8] as multiples of them."""
    packed = np.empty((len(s), 16), np.uint8)
    packed[:, 0:2] = d.astype("<f2").view(np.uint8)
    packed[:, 2:4] = dmin.astype("<f2").view(np.uint8)
    packed[:, 4:8] = s[:, :4] | s[:, 4:] >> 4 << 6
    packed[:, 8:12] = m[:, :4] | m[:, 4:] >> 4 << 6
    packed[:, 12:16] = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    return packed


def _affine_blocks(x: np.ndarray, levels: int, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale bytes [n, 16] and integers 0..levels [n, 8, 32] of blocks [n, 256].

    What the units d and dmin are rounded from is fitted once more, to the integers and multiples that the first ones gave.
    """
    runs = x.reshape(-1, 8, 32)
    scale, minimum = _affine(runs, levels, offsets)
    d, dmin = (_float16(part.max(-1, keepdims=True) / 63) for part in (scale, minimum))  # [n, 1]
    s, m = (np.clip(np.rint(part * _reciprocal(unit)), 0, 63) for part, unit in ((scale, d), (minimum, dmin)))  # [n, 8]

    def rounded(d: np.ndarray, dmin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The integers, and the squared error of each block [n, 1]."""
        step, low = (d * s)[..., None], (dmin * m)[..., None]
        q = np.clip(np.rint((runs + low) * _reciprocal(step)), 0, levels)
        return q, ((step * q - low - runs) ** 2).sum((1, 2))[:, None]

    q, error = rounded(d, dmin)
    for _ in range(REFITS):
        # The least squares of x = d (s q) - dmin m, two unknowns a block.
        sq, sx = (s * q.sum(-1)), runs.sum(-1)
        aa, bb, ab = (s * s * (q * q).sum(-1)).sum(-1), 32 * (m * m).sum(-1), (sq * m).sum(-1)
        ax, bx = (s * (q * runs).sum(-1)).sum(-1), (m * sx).sum(-1)
        inverse = _reciprocal(aa * bb - ab * ab)
        other = [
            _float16(np.maximum(v, 0))[:, None] for v in ((ax * bb - ab * bx) * inverse, (ab * ax - aa * bx) * inverse)
        ]
        new_q, new_error = rounded(*other)
        better = new_error < error
        d, dmin = (np.where(better, new, old) for new, old in zip(other, (d, dmin)))
        q, error = np.where(better[..., None], new_q, q), np.where(better, new_error, error)
    return _packed(d, dmin, s.astype(np.uint8), m.astype(np.uint8)), q.astype(np.uint8)


def _q4_k(x: np.ndarray) -> np.ndarray:
    packed, q = _affine_blocks(x, 15, np.arange(-10, 11) / 10)
    nibbles = q[:, 0::2] | q[:, 1::2] << 4  # [n, 4, 32]: runs 2p low, 2p + 1 high
    return np.concatenate([packed, nibbles.reshape(len(x), 128)], axis=1)


def _q5_k(x: np.ndarray) -> np.ndarray:
    packed, q = _affine_blocks(x, 31, np.arange(-10, 11) / 10)
    low = q & 15
    nibbles = low[:, 0::2] | low[:, 1::2] << 4
    high = np.bitwise_or.reduce(q >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)  # [n, 32], run r in bit r
    return np.concatenate([packed, high, nibbles.reshape(len(x), 128)], axis=1)


def _q6_k(x: np.ndarray) -> np.ndarray:
    runs = x.reshape(-1, 16, 16)
    extreme = np.take_along_axis(runs, np.abs(runs).argmax(-1, keepdims=True), -1)  # signed
    weight = runs * runs
    best_scale = np.zeros(runs.shape[:2], np.float32)
    best_gain = np.full(runs.shape[:2], -1, np.float32)
    # Each offset stretches the range a little; for its integers the best scale is a weighted projection, and the one
    # that explains most of the run wins. The extreme value goes to -32, the side with one level more.
    for offset in np.arange(-9, 10) / 10:
        q = np.clip(np.rint(runs * (-(32 + offset) * _reciprocal(extreme))), -32, 31)
        sum_qx, sum_qq = (weight * q * runs).sum(-1), (weight * q * q).sum(-1)
        scale = sum_qx * _reciprocal(sum_qq)
        gain = scale * sum_qx
        better = gain > best_gain
        best_scale, best_gain = np.where(better, scale, best_scale), np.where(better, gain, best_gain)

    largest = np.take_along_axis(best_scale, np.abs(best_scale).argmax(-1, keepdims=True), -1)  # [n, 1], signed
    d = _float16(largest / -128)
    s = np.clip(np.rint(best_scale * _reciprocal(d)), -128, 127)  # [n, 16]
    q = np.clip(np.rint(runs * _reciprocal((d * s)[..., None])), -32, 31) + 32
    q = q.astype(np.uint8).reshape(-1, 2, 4, 32)  # halves of four quarters
    low = q & 15
    ql = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=-1)  # [n, 2, 64]
    qh = np.bitwise_or.reduce(q >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)  # [n, 2, 32]
    parts = [ql.reshape(-1, 128), qh.reshape(-1, 64), s.astype(np.int8).view(np.uint8), d.astype("<f2").view(np.uint8)]
    return np.concatenate(parts, axis=1)


def _nvfp4(x: np.ndarray) -> np.ndarray:
    """The scale that is nearest to a sixth of the largest value of 16, then the nearest of the eight magnitudes."""
    runs = x.reshape(-1, 4, 16)
    scales, magnitudes = UE4M3[:0x7F], np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
    scale = np.searchsorted((scales[1:] + scales[:-1]) / 2, np.abs(runs).max(-1) / 6, side="right")  # [n, 4]
    scaled = np.abs(runs) * _reciprocal(UE4M3[scale] / 2)[..., None]
    code = np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, scaled).astype(np.uint8)
    code |= np.where((runs < 0) & (code > 0), 8, 0).astype(np.uint8)
    nibbles = code[..., :8] | code[..., 8:] << 4
    return np.concatenate([scale.astype(np.uint8), nibbles.reshape(-1, 32)], axis=1)


_SEARCHED: Mapping[GGMLType, Callable[[np.ndarray], np.ndarray]] = MappingProxyType(
    {GGMLType.Q4_K: _q4_k, GGMLType.Q5_K: _q5_k, GGMLType.Q6_K: _q6_k, GGMLType.NVFP4: _nvfp4}
)
