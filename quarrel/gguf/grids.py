"""Floats into the blocks of IQ1 to IQ3, whose values stand in groups of 4 or 8 that must be points of a fixed grid.

    error = sum w (s g - x)^2 = s^2 sum w g^2 - 2 s sum w x g + sum w x^2        of a point g, under a scale s

The two sums over a group, for all points at once, are one small matrix product, and the best point the least of a row. Of
each run a few scales are tried so; when the block's unit has rounded the best ones, all groups are searched once more under
what the file will hold. ggml looks at the points next to the rounded values only, and for values that are no quite what it
decodes (3 for 3.125): its squared error is 2 to 14 % larger. The grids are those of the gguf package.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from quarrel.gguf.encoders import Encoder, bytes_of, float16_of, reciprocal, sizes
from quarrel.gguf.formats import GGMLType

SCALES = np.array([0.9, 1.0, 1.1], np.float32)
"""Of the best scale without a grid. One alone loses 3 to 6 %, five win 1 %."""
DELTA = np.float32(0.125)
"""IQ1's values -1, 0 and 1 are moved by it, up or down."""
_MOST = 1 << 18
"""Multiplications of a matrix product that OpenBLAS leaves to one thread: pieces of a model have one each already."""
_OUT = 1 << 19
"""Errors held at a time, 2 MB."""


@functools.cache
def _grid(name: str) -> np.ndarray:
    """Points [G, k], the smallest magnitude of a magnitude's grid 1."""
    from gguf import quants  # only here, for it takes long

    kind = getattr(quants, name)
    kind.init_grid()
    points: np.ndarray = np.array(kind.grid, np.float32).reshape(kind.grid_shape)
    points /= points[points > 0].min()
    return points


def _sums(x: np.ndarray, weight: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sum w x q and sum w q q of runs [n, R, groups, k] -> [n, R]."""
    weighted = weight * q
    return (weighted * x).sum((-1, -2)), (weighted * q).sum((-1, -2))


def _points(grid: np.ndarray, x: np.ndarray, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Numbers of the best points: groups [n, R, groups, k] under scales [n, R] -> [n, R, groups]."""
    k = x.shape[-1]
    table = np.concatenate([grid * grid, grid], 1).T
    s = scale[..., None, None]
    sums = np.concatenate([weight * (s * s), weight * x * (-2 * s)], -1).reshape(-1, 2 * k)
    rows = max(1, _MOST // table.size)
    step = rows * max(1, _OUT // (rows * len(grid)))
    found = np.empty(len(sums), np.int64)
    for start in range(0, len(sums), step):
        part = sums[start : start + step]
        whole = len(part) // rows * rows
        if whole:
            found[start : start + whole] = (part[:whole].reshape(-1, rows, 2 * k) @ table).argmin(-1).reshape(-1)
        if whole < len(part):
            found[start + whole : start + len(part)] = (part[whole:] @ table).argmin(-1)
    return found.reshape(x.shape[:-1])


class _Best:
    """The scale of each run [n, R] that explains most of it, among integers that are tried one after the other."""

    def __init__(self, x: np.ndarray, weight: np.ndarray) -> None:
        self._x, self._weight = x, weight
        self.scale, self._gain = (np.zeros(x.shape[:2], np.float32) for _ in range(2))

    def put(self, q: np.ndarray) -> np.ndarray:
        """Which runs it is better for."""
        sum_qx, sum_qq = _sums(self._x, self._weight, q)
        gain = sum_qx * sum_qx * reciprocal(sum_qq)
        better: np.ndarray = (gain > self._gain) & (sum_qx > 0)
        self.scale = np.where(better, sum_qx * reciprocal(sum_qq), self.scale)
        self._gain = np.where(better, gain, self._gain)
        return better


def _codes(scale: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The unit of each block [n, 1] and odd multiples of it, up to `most`, for the scales of its runs [n, R]."""
    d = float16_of(scale.max(-1, keepdims=True) / most)
    return d, 2 * np.clip(np.rint((scale * reciprocal(d) - 1) / 2), 0, most // 2) + 1


def _unit(x: np.ndarray, weight: np.ndarray, q: np.ndarray, multiple: np.ndarray) -> np.ndarray:
    """The unit [n, 1] that fits all runs of a block at once, in float16."""
    sum_qx, sum_qq = (part.sum(-1, keepdims=True) for part in _sums(x, weight, q * multiple[..., None, None]))
    return float16_of(np.maximum(sum_qx * reciprocal(sum_qq), 0))


def _magnitudes(
    x: np.ndarray, importance: np.ndarray | None, name: str, run: int, *, even: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of blocks [n, 256], a grid of magnitudes and runs of so many values: units [n, 1], codes of the scales [n, R], points
    [n, 256 / k], and signs [n, 32] in bits. even: the number of negative values in eight is, and the last sign is left out.
    """
    grid, n = _grid(name), len(x)
    levels = np.unique(grid)
    shape = (n, 256 // run, run // grid.shape[1], grid.shape[1])
    weight = sizes(x, importance).reshape(shape)
    negative = (x < 0).reshape(n, 32, 8)
    if even:
        # The value whose wrong sign costs least has it.
        cost = (weight.reshape(x.shape) * x * x).reshape(negative.shape)
        flipped = np.zeros_like(negative)
        np.put_along_axis(flipped, cost.argmin(-1)[..., None], negative.sum(-1, keepdims=True) % 2 == 1, -1)
        negative = negative ^ flipped
    size = np.where(negative, -x.reshape(negative.shape), x.reshape(negative.shape)).reshape(shape)
    largest, best = size.max((-1, -2)), _Best(size, weight)
    for stretch in np.arange(-9, 10, 2) * (0.2 if len(levels) > 3 else 0.1):
        nearest = (size * ((2 * len(levels) - 1 + stretch) * reciprocal(largest))[..., None, None] - 1) / 2
        best.put(levels[np.clip(np.rint(nearest), 0, len(levels) - 1).astype(np.int64)])
    free, best = best.scale, _Best(size, weight)
    for factor in SCALES:
        best.put(grid[_points(grid, size, weight, free * factor)])
    d, multiple = _codes(best.scale, 31)
    points = _points(grid, size, weight, d * multiple)
    d = _unit(size, weight, grid[points], multiple)
    signs = np.packbits(negative, axis=-1, bitorder="little")[..., 0]
    return d, (multiple / 2).astype(np.uint8), points.reshape(n, -1), signs & 127 if even else signs


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Neighbours of codes of 4 bits [n, R] as [n, R / 2]."""
    pairs: np.ndarray = codes[:, 0::2] | codes[:, 1::2] << 4
    return pairs


def _words(parts: Sequence[np.ndarray], shifts: Sequence[int], dtype: str) -> np.ndarray:
    """Integers [n, m] side by side in the bits of words, as bytes."""
    words = np.bitwise_or.reduce([part.astype(dtype) << shift for part, shift in zip(parts, shifts)])
    raw: np.ndarray = np.ascontiguousarray(words).view(np.uint8)
    return raw


def _quarters(values: np.ndarray) -> list[np.ndarray]:
    return [values[:, i::4] for i in range(4)]


def _iq2_xxs(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d, codes, points, signs = _magnitudes(x, importance, "IQ2_XXS", 32, even=True)
    low = _words(_quarters(points), (0, 8, 16, 24), "<u4").reshape(len(x), 8, 4)
    high = _words([*_quarters(signs), codes], (0, 7, 14, 21, 28), "<u4").reshape(len(x), 8, 4)
    return np.concatenate([bytes_of(d), np.concatenate([low, high], -1).reshape(len(x), 64)], 1)


def _iq2_xs(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d, codes, points, signs = _magnitudes(x, importance, "IQ2_XS", 16, even=True)
    return np.concatenate([bytes_of(d), _words([points, signs], (0, 9), "<u2"), _nibbles(codes)], 1)


def _iq2_s(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d, codes, points, signs = _magnitudes(x, importance, "IQ2_S", 16, even=False)
    high = _words(_quarters(points >> 8), (0, 2, 4, 6), "u1")
    return np.concatenate([bytes_of(d), (points & 255).astype(np.uint8), signs, high, _nibbles(codes)], 1)


def _iq3_xxs(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d, codes, points, signs = _magnitudes(x, importance, "IQ3_XXS", 32, even=True)
    scales = _words([*_quarters(signs), codes], (0, 7, 14, 21, 28), "<u4")
    return np.concatenate([bytes_of(d), points.astype(np.uint8), scales], 1)


def _iq3_s(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d, codes, points, signs = _magnitudes(x, importance, "IQ3_S", 32, even=False)
    high = np.packbits(points >> 8, axis=-1, bitorder="little")
    return np.concatenate([bytes_of(d), (points & 255).astype(np.uint8), high, signs, _nibbles(codes)], 1)


def _ternary(
    x: np.ndarray, importance: np.ndarray | None, run: int, *, apart: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of blocks [n, 256] in runs of so many values: units [n, 1], codes of the scales [n, R], points [n, 32] and which of
    them are moved down [n, 32]. apart: each group of eight is moved by itself, else those of a run together."""
    grid, n = _grid("IQ1_S"), len(x)
    shape = (n, 256 // run, run // 8, 8)
    x, weight = x.reshape(shape), sizes(x, importance).reshape(shape)
    best = _Best(x, weight)
    spread = np.sqrt((weight * x * x).sum((-1, -2)) * reciprocal(weight.sum((-1, -2))))
    for factor in np.arange(9, 22, 2) / np.float32(10):
        scaled = x * reciprocal(spread * factor)[..., None, None]
        up, down = (np.clip(np.rint(scaled - move), -1, 1) + move for move in (DELTA, -DELTA))
        best.put(up)
        best.put(down)
        if apart:
            first = np.arange(run // 8)[:, None] == 0
            best.put(np.where(first, up, down))
            best.put(np.where(first, down, up))
    d, multiple = _codes(best.scale, 15)
    scale = d * multiple
    tried = []
    for move in (DELTA, -DELTA):
        points = _points(grid, x - (scale * move)[..., None, None], weight, scale)
        q = grid[points] + move
        error = (weight * (scale[..., None, None] * q - x) ** 2).sum(-1)
        tried.append((points, q, error if apart else error.sum(-1, keepdims=True)))
    (points, q, error), (other, other_q, other_error) = tried
    down = np.broadcast_to(other_error < error, points.shape)
    points, q = np.where(down, other, points), np.where(down[..., None], other_q, q)
    d = _unit(x, weight, q, multiple)
    return d, (multiple / 2).astype(np.uint8), points.reshape(n, 32), down.reshape(n, 32)


def _iq1_s(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d, codes, points, down = _ternary(x, importance, 32, apart=False)
    high = _words([*_quarters(points >> 8), codes, down[:, 0::4]], (0, 3, 6, 9, 12, 15), "<u2")
    return np.concatenate([bytes_of(d), (points & 255).astype(np.uint8), high], 1)


def _iq1_m(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    d, codes, points, down = _ternary(x, importance, 16, apart=True)
    high = (points >> 8 | down << 3).astype(np.uint8)
    unit = d.astype("<f2").view("<u2") >> np.array([0, 4, 8, 12], np.uint16) & 15  # [n, 4], four bits of it in each word
    scales = _words([*_quarters(codes), unit], (0, 3, 6, 9, 12), "<u2")
    return np.concatenate([(points & 255).astype(np.uint8), _nibbles(high), scales], 1)


GRIDS: Mapping[GGMLType, Encoder] = MappingProxyType(
    {
        GGMLType.IQ2_XXS: _iq2_xxs,
        GGMLType.IQ2_XS: _iq2_xs,
        GGMLType.IQ2_S: _iq2_s,
        GGMLType.IQ3_XXS: _iq3_xxs,
        GGMLType.IQ3_S: _iq3_s,
        GGMLType.IQ1_S: _iq1_s,
        GGMLType.IQ1_M: _iq1_m,
    }
)
