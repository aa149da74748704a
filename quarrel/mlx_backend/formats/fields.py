"""Bit fields of raw blocks, taken apart and put together again by MLX, in the order that `codes.py` reads them in.

A lane holds 16 columns of a block: 8h to 8h + 7, and those plus 16. Metal takes them out of a word as pairs of 16-bit
fields; pair p is bytes (0, 2) or (1, 3) of word p / 4, low nibbles or (p & 2) high ones. The planes of 1 and 2 bits a code
hold first the fields of the pairs' first columns, then of the second ones, so that one shift serves both; where among the
eight a pair's field stands is such that few shifts serve all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from quarrel.mlx_backend.formats.layout import F16, U8, U16, U32, Split
from quarrel.ops.contract import Array

_FIRST = np.array([(p & 1) + 4 * (p >> 2) + 16 * (p >> 1 & 1) for p in range(8)])


def _order(places: Sequence[int]) -> Array:
    """The columns of a block in the order of their fields; `places[p]` is where pair p's field stands."""
    pairs = _FIRST[np.argsort(places)]
    return np.concatenate([np.concatenate([pairs, pairs + 2]) + 8 * h for h in (0, 1)])


IN_ORDER = _order(range(8))
# Low pairs and the high pairs beside them four bits apart, as their places in the mantissa are.
FIFTH_BESIDE_NIBBLES = _order([(p >> 2) * 2 + (p & 1) + (p & 2) * 2 for p in range(8)])
UPPER_BESIDE_NIBBLES = _order([(p >> 2) * 4 + (p & 1) + (p & 2) for p in range(8)])
THIRD_BESIDE_TWOS = _order([p % 4 * 2 + p // 4 for p in range(8)])


# Lane, word, half of the word, place.
_FOURS = (np.arange(2)[:, None, None, None] * 8 + np.arange(2)[:, None] * 2 + _FIRST.reshape(2, 1, 4)).reshape(-1)
MAGNITUDES, SIGNS = (9, 6, 3, 0), (15, 12, 14, 13)
"""Bits where `fours` stand in a word of 16."""


def fours_apart(words: mx.array) -> mx.array:
    """What `fours` made, as codes again."""
    shorts = mx.contiguous(words).view(U16)[..., None]
    codes = (shorts >> mx.array(MAGNITUDES, U16) & 7) | (shorts >> mx.array(SIGNS, U16) & 1) << 3
    return codes.astype(U8).reshape(*words.shape[:-1], 32)[..., mx.array(np.argsort(_FOURS))]


def view(raw: mx.array, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
    """Bytes `start` to `stop` of every block as numbers of `dtype`."""
    return mx.contiguous(raw[..., start:stop]).view(dtype)


def unshift(raw: mx.array, shifts: Sequence[int], mask: int) -> mx.array:
    """`[..., bytes]` to `[..., len(shifts), bytes]`: the same bytes shifted down by each."""
    return (raw[..., None, :] >> mx.array(list(shifts), U8)[:, None]) & mx.array(mask, U8)


def nibbles(codes: mx.array) -> mx.array:
    """Codes of 4 bits `[..., 32]` to words `[..., 4]`: a byte holds column j below column j + 16."""
    return mx.contiguous(codes[..., :16] | (codes[..., 16:] << 4)).view(U32)


def nibbles_apart(words: mx.array) -> mx.array:
    """What `nibbles` made, as codes again."""
    raw = mx.contiguous(words).view(U8)
    return mx.concatenate([raw & 15, raw >> 4], -1)


def words(codes: mx.array, bits: int, order: Array) -> mx.array:
    """Codes of 1 or 2 bits `[..., 32]` to two words `[..., 2]` of 16 or 32 bits, each the columns of a lane."""
    per = 8 // bits
    ordered = codes[..., mx.array(order)]
    parts = ordered.reshape(*codes.shape[:-1], 32 // per, per) << mx.arange(0, 8, bits).astype(U8)
    return mx.contiguous(parts.sum(-1).astype(U8)).view(U16 if bits == 1 else U32)


def words_apart(words: mx.array, bits: int, order: Array) -> mx.array:
    """What `words` made, as codes `[..., 32]` again."""
    fields = mx.contiguous(words).view(U8)[..., None] >> mx.arange(0, 8, bits).astype(U8) & ((1 << bits) - 1)
    return fields.reshape(*words.shape[:-1], 32)[..., mx.array(np.argsort(order))]


def in_six_bits(a: mx.array, m: mx.array) -> tuple[mx.array, mx.array]:
    """Two numbers of 6 bits for each block `[..., 8]` to bytes `[..., 8]` with the lower 4 bits of both, and `[..., 4]`
    with the upper 2 of both of two blocks."""
    high = (a >> 4) | ((m >> 4) << 2)
    return mx.contiguous((a & 15) | (m << 4)), mx.contiguous(high[..., ::2] | (high[..., 1::2] << 4))


def fours(codes: mx.array) -> mx.array:
    """Codes in E2M1 `[..., 32]` to words `[..., 4]`, as `fours` of `codes.py` takes them apart."""
    ordered = codes[..., mx.array(_FOURS)].astype(U16).reshape(*codes.shape[:-1], 8, 4)
    placed = ((ordered & 7) << mx.array(MAGNITUDES, U16)) | ((ordered >> 3) << mx.array(SIGNS, U16))
    return mx.contiguous(placed.sum(-1).astype(U16)).view(U32)


def scales_then_nibbles(scales: int) -> Split:
    """Blocks of 32: so many float16 numbers, then nibbles in the planes' own order."""

    def split(raw: mx.array) -> Sequence[mx.array]:
        at = 2 * scales
        return view(raw, at, at + 16, U32), view(raw, 0, at, F16)

    return split


def scales_fifth_bits_nibbles(scales: int) -> Split:
    """Blocks of 32: so many float16 numbers, a word of fifth bits, then nibbles in the planes' own order."""

    def split(raw: mx.array) -> Sequence[mx.array]:
        at = 2 * scales
        fifth = unshift(raw[..., at : at + 4, None], range(8), 1)[..., 0]  # [rows, blocks, 4, 8]
        fifth = words(fifth.reshape(*raw.shape[:2], 32), 1, FIFTH_BESIDE_NIBBLES)
        return view(raw, at + 4, at + 20, U32), fifth, view(raw, 0, at, F16)

    return split


def scales_of_6_bits(raw: mx.array) -> mx.array:
    """The 12 bytes of Q4_K and Q5_K to `[..., 8, 2]` bytes: scale and minimum of each block of 32."""
    a, b, c = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scale = mx.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], -1)
    minimum = mx.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], -1)
    return mx.stack([scale, minimum], -1)
