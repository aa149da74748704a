"""Floats into blocks whose scales are searched: the K formats, IQ4, NVFP4, and with importance the older ones too.

An encoder takes the values of blocks [n, elements] and how much the error of each weighs, in the same shape, or None where
the values alone tell. The searches are llama.cpp's, over all blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from quarrel.gguf.blocks import UE4M3
from quarrel.gguf.formats import GGMLType

Encoder = Callable[[np.ndarray, np.ndarray | None], np.ndarray]

REFITS = 2
"""Of weights on a grid of 4 bits the mean squared error was 1.02 to 1.03 of llama.cpp's without in Q4_K, is 0.99 with two;
0.93 in Q5_K, which was 1.07 with the offsets that llama.cpp has, from -0.5 to 0.9."""

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_BETWEEN = (IQ4_VALUES[1:] + IQ4_VALUES[:-1]) / 2


def float16_of(x: np.ndarray) -> np.ndarray:
    """Rounds to float16 and back: later steps must see the scale that the file will hold."""
    return x.astype(np.float16).astype(np.float32)


def reciprocal(x: np.ndarray) -> np.ndarray:
    inverse: np.ndarray = np.divide(1, x, out=np.zeros_like(x), where=x != 0)
    return inverse


def _affine(x: np.ndarray, weight: np.ndarray, levels: int, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and (negated) minimum of each run: x [n, runs, r] -> two arrays [n, runs], all >= 0, for
    x ~ scale * q - minimum with q in 0..levels.

    Each offset stretches the range a little and gives integers q; the weighted least squares line through (q, x) is a
    candidate, and the candidate with the least weighted error wins.
    """
    low, high = np.minimum(x.min(-1, keepdims=True), 0), x.max(-1, keepdims=True)
    spread = high - low
    total, sum_x = weight.sum(-1), (weight * x).sum(-1)

    best_scale, best_low = spread[..., 0] / levels, low[..., 0]
    fit = best_scale[..., None] * np.clip(np.rint((x - low) * reciprocal(best_scale[..., None])), 0, levels) + low
    best_error = (weight * (fit - x) ** 2).sum(-1)
    for offset in offsets:
        q = np.clip(np.rint((x - low) * ((levels + offset) * reciprocal(spread))), 0, levels)
        weighted = weight * q
        sum_q, sum_qq, sum_qx = weighted.sum(-1), (weighted * q).sum(-1), (weighted * x).sum(-1)
        determinant = total * sum_qq - sum_q * sum_q
        usable = determinant > 0
        inverse = np.divide(1, determinant, out=np.zeros_like(determinant), where=usable)
        scale = (total * sum_qx - sum_x * sum_q) * inverse
        bottom = (sum_qq * sum_x - sum_q * sum_qx) * inverse
        # The format can only subtract: a line that would start above zero is fitted again through zero.
        above = bottom > 0
        scale = np.where(above, sum_qx * reciprocal(sum_qq), scale)
        bottom = np.where(above, 0, bottom)
        error = (weight * (scale[..., None] * q + bottom[..., None] - x) ** 2).sum(-1)
        better = usable & (error < best_error)
        best_scale = np.where(better, scale, best_scale)
        best_low = np.where(better, bottom, best_low)
        best_error = np.where(better, error, best_error)
        low = best_low[..., None]  # the next candidates begin where the best one does
        spread = high - low
    return best_scale, -best_low


def _multiples(x: np.ndarray, weight: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The unit of each block [n, 1], in float16, and integers 0..most [n, runs]: x ~ unit * integers, none below 0.

    The best of nine stretched ranges, then one integer after the other as the least squares of all would have it.
    """
    largest = x.max(-1, keepdims=True)
    unit, best = largest / most, np.full_like(largest, np.inf)
    for offset in (0, *range(-4, 0), *range(1, 5)):
        each = largest / (most + 0.1 * offset)
        q = np.clip(np.rint(x * reciprocal(each)), 0, most)
        error = (weight * (x - each * q) ** 2).sum(-1, keepdims=True)
        unit, best = np.where(error < best, each, unit), np.minimum(error, best)
    q = np.clip(np.rint(x * reciprocal(unit)), 0, most)
    sum_qx, sum_qq = (weight * x * q).sum(-1), (weight * q * q).sum(-1)
    for _ in range(5):
        for i in range(x.shape[-1]):
            w, value, old = weight[:, i], x[:, i], q[:, i]
            rest_x, rest_q = sum_qx - w * value * old, sum_qq - w * old * old
            new = np.minimum(np.rint(value * rest_q * reciprocal(rest_x)), most)
            new_x, new_q = rest_x + w * value * new, rest_q + w * new * new
            better = (rest_x > 0) & (rest_q > 0) & (new_x * new_x * sum_qq > sum_qx * sum_qx * new_q)
            q[:, i] = np.where(better, new, old)
            sum_qx, sum_qq = np.where(better, new_x, sum_qx), np.where(better, new_q, sum_qq)
    return float16_of((sum_qx * reciprocal(sum_qq))[:, None]), q


def _signed(
    x: np.ndarray, weight: np.ndarray, factors: np.ndarray, rounded: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """The scale of each run: x [..., r] -> [...], for x ~ scale * q. A factor says what the value farthest from zero is
    stretched to before it is rounded; for the integers of each the best scale is a weighted projection, and the one that
    explains most of the run wins."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)  # signed
    best_scale = np.zeros(x.shape[:-1], np.float32)
    best_gain = np.full(x.shape[:-1], -1, np.float32)
    for factor in factors:
        q = rounded(x * (factor * reciprocal(extreme)))
        weighted = weight * q
        sum_qx, sum_qq = (weighted * x).sum(-1), (weighted * q).sum(-1)
        scale = sum_qx * reciprocal(sum_qq)
        gain = scale * sum_qx
        better = gain > best_gain
        best_scale, best_gain = np.where(better, scale, best_scale), np.where(better, gain, best_gain)
    return best_scale


def _integers(x: np.ndarray, weight: np.ndarray, n: int) -> np.ndarray:
    """`_signed` for integers -n..n-1; the extreme value goes to -n, the side with one level more."""
    return _signed(x, weight, -(n + np.arange(-9, 10) / 10), lambda scaled: np.clip(np.rint(scaled), -n, n - 1))


def _squares(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    return x * x if importance is None else importance.reshape(x.shape)


def sizes(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """Large values weigh more, and small ones something."""
    if importance is not None:
        return importance.reshape(x.shape)
    weight: np.ndarray = np.abs(x) + np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    return weight


OFFSETS, FINE = np.arange(-10, 11) / 10, np.arange(-18, 19) / 20


def _affine_blocks(
    x: np.ndarray, importance: np.ndarray | None, width: int, levels: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of blocks [n, 256] in runs of `width`: units d and dmin [n, 1], the scales and minima as multiples of them up to
    `most` [n, runs], and integers 0..levels [n, runs, width].

    What the units are rounded from is fitted once more, to the integers and multiples that the first ones gave.
    """
    runs = x.reshape(len(x), -1, width)
    weight = sizes(runs, importance)
    share = np.ones_like(runs) if importance is None else weight  # of an error when units are fitted
    scale, minimum = _affine(runs, weight, levels, OFFSETS if importance is None else FINE)
    if importance is None:
        d, dmin = (float16_of(part.max(-1, keepdims=True) / most) for part in (scale, minimum))  # [n, 1]
        s, m = (np.clip(np.rint(p * reciprocal(unit)), 0, most) for p, unit in ((scale, d), (minimum, dmin)))  # [n, runs]
    else:
        (d, s), (dmin, m) = (_multiples(part, weight.sum(-1), most) for part in (scale, minimum))

    def rounded(d: np.ndarray, dmin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The integers, and the squared error of each block [n, 1]."""
        step, low = (d * s)[..., None], (dmin * m)[..., None]
        q = np.clip(np.rint((runs + low) * reciprocal(step)), 0, levels)
        return q, (share * (step * q - low - runs) ** 2).sum((1, 2))[:, None]

    q, error = rounded(d, dmin)
    total, sum_x = share.sum(-1), (share * runs).sum(-1)
    for _ in range(REFITS):
        # The least squares of x = d (s q) - dmin m, two unknowns a block.
        shared = share * q
        aa, bb = (s * s * (shared * q).sum(-1)).sum(-1), (m * m * total).sum(-1)
        ab = (s * m * shared.sum(-1)).sum(-1)
        ax, bx = (s * (shared * runs).sum(-1)).sum(-1), (m * sum_x).sum(-1)
        inverse = reciprocal(aa * bb - ab * ab)
        other = [
            float16_of(np.maximum(v, 0))[:, None] for v in ((ax * bb - ab * bx) * inverse, (ab * ax - aa * bx) * inverse)
        ]
        new_q, new_error = rounded(*other)
        better = new_error < error
        d, dmin = (np.where(better, new, old) for new, old in zip(other, (d, dmin)))
        q, error = np.where(better[..., None], new_q, q), np.where(better, new_error, error)
    return d, dmin, s.astype(np.uint8), m.astype(np.uint8), q.astype(np.uint8)


def bytes_of(d: np.ndarray) -> np.ndarray:
    """float16 [n, 1] as bytes [n, 2]."""
    raw: np.ndarray = d.astype("<f2").view(np.uint8)
    return raw


def _packed(d: np.ndarray, dmin: np.ndarray, s: np.ndarray, m: np.ndarray) -> np.ndarray:
    """The 16 first bytes of a Q4_K or Q5_K block: units [n, 1], and the scales and minima [n, 8] as multiples of them."""
    low, high = s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6
    return np.concatenate([bytes_of(d), bytes_of(dmin), low, high, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], axis=1)


def _pairs(q: np.ndarray) -> np.ndarray:
    """Codes of 4 bits of blocks [n, 32] as [n, 16]: the first half low, the second high."""
    nibbles: np.ndarray = q[:, :16] | q[:, 16:] << 4
    return nibbles


def _fours(q: np.ndarray) -> np.ndarray:
    """Codes of 2 bits [n, 256] as [n, 64]: four quarters of each half in a byte."""
    quarters = q.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes: np.ndarray = np.bitwise_or.reduce(quarters, axis=2).reshape(-1, 64)
    return codes


def _high(q: np.ndarray, bit: int) -> np.ndarray:
    """One bit of codes [n, 8, 32] as [n, 32], run r in bit r."""
    bits: np.ndarray = np.bitwise_or.reduce((q >> bit & 1) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return bits


def _q2_k(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d, dmin, s, m, q = _affine_blocks(x, importance, 16, 3, 15)
    return np.concatenate([s | m << 4, _fours(q), bytes_of(d), bytes_of(dmin)], axis=1)


def _q3_k(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    runs = x.reshape(-1, 16, 16)
    weight = sizes(runs, importance)
    scale = _integers(runs, weight, 4)
    d = float16_of(_integers(scale, weight.sum(-1), 32)[:, None])
    s = np.clip(np.rint(scale * reciprocal(d)), -32, 31)  # [n, 16]
    q = (np.clip(np.rint(runs * reciprocal((d * s)[..., None])), -4, 3) + 4).astype(np.uint8).reshape(-1, 8, 32)
    codes = (s + 32).astype(np.uint8)
    upper = np.bitwise_or.reduce(codes.reshape(-1, 4, 4) >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=1)
    scales = np.concatenate([codes[:, :8] & 15 | (codes[:, 8:] & 15) << 4, upper], axis=1)
    return np.concatenate([_high(q, 2), _fours(q & 3), scales, bytes_of(d)], axis=1)


def _q4_k(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    *scales, q = _affine_blocks(x, importance, 32, 15, 63)
    nibbles = q[:, 0::2] | q[:, 1::2] << 4  # [n, 4, 32]: runs 2p low, 2p + 1 high
    return np.concatenate([_packed(*scales), nibbles.reshape(len(x), 128)], axis=1)


def _q5_k(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    *scales, q = _affine_blocks(x, importance, 32, 31, 63)
    low = q & 15
    nibbles = low[:, 0::2] | low[:, 1::2] << 4
    return np.concatenate([_packed(*scales), _high(q, 4), nibbles.reshape(len(x), 128)], axis=1)


def _q6_k(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    runs = x.reshape(-1, 16, 16)
    scale = _integers(runs, _squares(runs, importance), 32)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(-1, keepdims=True), -1)  # [n, 1], signed
    d = float16_of(largest / -128)
    s = np.clip(np.rint(scale * reciprocal(d)), -128, 127)  # [n, 16]
    q = np.clip(np.rint(runs * reciprocal((d * s)[..., None])), -32, 31) + 32
    q = q.astype(np.uint8).reshape(-1, 2, 4, 32)  # halves of four quarters
    low = q & 15
    ql = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=-1)  # [n, 2, 64]
    parts = [ql.reshape(-1, 128), _fours(q.reshape(-1, 256) >> 4), s.astype(np.int8).view(np.uint8), bytes_of(d)]
    return np.concatenate(parts, axis=1)


def _nearest(scaled: np.ndarray) -> np.ndarray:
    return np.searchsorted(_BETWEEN, scaled, side="right").astype(np.uint8)


def _iq4_scale(runs: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """The scale of each run [..., 32] of codes for the 16 values of IQ4."""
    factors = np.concatenate([[-IQ4_VALUES[0]], IQ4_VALUES[0] + np.arange(-7, 8)])
    return _signed(runs, _squares(runs, importance), factors, lambda scaled: IQ4_VALUES[_nearest(scaled)])


def _iq4_nl(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d = float16_of(_iq4_scale(x, importance)[:, None])
    return np.concatenate([bytes_of(d), _pairs(_nearest(x * reciprocal(d)))], axis=1)


def _iq4_xs(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    runs = x.reshape(-1, 8, 32)
    scale = _iq4_scale(runs, importance)
    d = float16_of(np.take_along_axis(scale, np.abs(scale).argmax(-1, keepdims=True), -1) / -32)
    s = np.clip(np.rint(scale * reciprocal(d)), -32, 31)  # [n, 8]
    q = _nearest(runs * reciprocal((d * s)[..., None]))
    codes = (s + 32).astype(np.uint16)
    high = np.bitwise_or.reduce(codes >> 4 << 2 * np.arange(8, dtype=np.uint16), axis=1).astype("<u2")
    low = (codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).astype(np.uint8)
    nibbles = _pairs(q.reshape(-1, 32)).reshape(len(x), 128)
    return np.concatenate([bytes_of(d), high.view(np.uint8).reshape(-1, 2), low, nibbles], axis=1)


def _nvfp4(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """The scale that is nearest to a sixth of the largest value of 16, then the nearest of the eight magnitudes."""
    runs = x.reshape(-1, 4, 16)
    scales, magnitudes = UE4M3[:0x7F], np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
    scale = np.searchsorted((scales[1:] + scales[:-1]) / 2, np.abs(runs).max(-1) / 6, side="right")  # [n, 4]
    scaled = np.abs(runs) * reciprocal(UE4M3[scale] / 2)[..., None]
    code = np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, scaled).astype(np.uint8)
    code |= np.where((runs < 0) & (code > 0), 8, 0).astype(np.uint8)
    nibbles = code[..., :8] | code[..., 8:] << 4
    return np.concatenate([scale.astype(np.uint8), nibbles.reshape(-1, 32)], axis=1)


def _bits(q: np.ndarray) -> np.ndarray:
    """The fifth bit of codes [n, 32] as bytes [n, 4]."""
    return np.packbits(q >> 4, axis=1, bitorder="little")


def _legacy(levels: int, signed: bool) -> Encoder:
    """Q4_0, Q4_1, Q5_0 and Q5_1: 32 values with one scale, and a minimum if they are not signed."""

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        weight = np.ones_like(x) if importance is None else importance
        if signed:
            n = (levels + 1) // 2
            d = float16_of(_integers(x, weight, n)[:, None])
            q, scales = np.clip(np.rint(x * reciprocal(d)), -n, n - 1) + n, [bytes_of(d)]
        else:
            d, low = (float16_of(v) for v in _affine(x[:, None], weight[:, None], levels, FINE))
            q, scales = np.clip(np.rint((x + low) * reciprocal(d)), 0, levels), [bytes_of(d), bytes_of(-low)]
        codes = q.astype(np.uint8)
        bits = [_bits(codes)] if levels > 15 else []
        return np.concatenate([*scales, *bits, _pairs(codes & 15)], axis=1)

    return encode


SEARCHED: Mapping[GGMLType, Encoder] = MappingProxyType(
    {
        GGMLType.Q2_K: _q2_k,
        GGMLType.Q3_K: _q3_k,
        GGMLType.Q4_K: _q4_k,
        GGMLType.Q5_K: _q5_k,
        GGMLType.Q6_K: _q6_k,
        GGMLType.IQ4_NL: _iq4_nl,
        GGMLType.IQ4_XS: _iq4_xs,
        GGMLType.NVFP4: _nvfp4,
    }
)
WEIGHTED: Mapping[GGMLType, Encoder] = MappingProxyType(
    {
        GGMLType.Q4_0: _legacy(15, True),
        GGMLType.Q4_1: _legacy(15, False),
        GGMLType.Q5_0: _legacy(31, True),
        GGMLType.Q5_1: _legacy(31, False),
    }
)
"""Those of which the gguf package has a quantiser, but none that heeds importance."""
SPREAD: Mapping[GGMLType, tuple[int, float]] = MappingProxyType(
    {
        **dict.fromkeys(WEIGHTED, (0, 1.0)),
        GGMLType.Q2_K: (256, 1.0),
        **dict.fromkeys((GGMLType.IQ2_XXS, GGMLType.IQ2_XS), (256, 1.0)),
        **dict.fromkeys((GGMLType.Q3_K, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.IQ4_XS), (256, 2.0)),
        **dict.fromkeys((GGMLType.IQ3_XXS, GGMLType.IQ3_S, GGMLType.IQ2_S, GGMLType.IQ1_S, GGMLType.IQ1_M), (256, 2.0)),
        GGMLType.IQ4_NL: (32, 2.0),
    }
)
"""An error weighs importance * sqrt(factor * mean square + x * x): the mean over so many values, 0 being a row; and the
factor. In other formats, Q6_K, importance alone."""


def error_weights(x: np.ndarray, importance: np.ndarray, kind: GGMLType) -> np.ndarray:
    """How much an error of each value weighs: rows x [n, k] of finite values, importance [k] or [n, k] -> [n, k]."""
    if kind not in SPREAD:
        return np.broadcast_to(importance, x.shape)
    size, factor = SPREAD[kind]
    runs = x.reshape(len(x), -1, size or x.shape[-1])
    spread = factor * np.mean(runs * runs, axis=-1, keepdims=True) + runs * runs
    weights: np.ndarray = importance * np.sqrt(spread).reshape(x.shape)
    return weights
