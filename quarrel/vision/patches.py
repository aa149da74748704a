"""From pixels to patches: how large an image is made, and in which order its patches come.

Sizes are Qwen's "smart resize", or one square for all. Values are (pixel / 255 - mean) / std. A patch is `[3, p, p]`,
flattened; patches stand in groups of `merge` x `merge`, row by row within a group and from group to group.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quarrel.errors import RequestError

Array = npt.NDArray[Any]
MOST_STRETCHED = 200
"""How much longer than wide an image may be, or wider than long."""


@dataclass(frozen=True)
class Preparation:
    """What a tower wants of its images. `side`: of all of them in pixels, or 0 where an image keeps its shape, between
    `min_pixels` and `max_pixels`. Two images of equal pixels and equal preparation are one."""

    patch: int
    merge: int
    side: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    filter: Literal["bicubic", "bilinear"]
    shape: Literal["near", "within", "below"] = "near"
    """Of an image that keeps its shape: sides rounded (Qwen); within a square of `max_pixels`, sides rounded up (Pixtral);
    as large as `max_pixels` allows, sides rounded down (Gemma 4)."""
    pad: tuple[int, ...] = ()
    """The colour around an image that is no square, where it is not stretched to one."""
    breaks: bool = False
    """Each row of tokens but the last has one more behind it."""

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that an image is resized to."""
        if self.side:
            return self.side, self.side
        if max(width, height) > MOST_STRETCHED * min(width, height):
            raise RequestError(
                f"an image is {width} x {height} pixels, wanted one at most {MOST_STRETCHED} times as long as wide", "image"
            )
        unit = self.patch * self.merge
        if self.shape == "within":
            shrink = max(1.0, max(width, height) / math.isqrt(self.max_pixels))
            w, h = (max(1, math.floor(side / shrink)) for side in (width, height))
            return -(-w // unit) * unit, -(-h // unit) * unit
        if self.shape == "below":
            factor, most = math.sqrt(self.max_pixels / (width * height)), self.max_pixels // unit
            w, h = (math.floor(factor * side / unit) * unit for side in (width, height))
            # A side that would be nothing is one unit, the other as much longer as it was.
            w, h = w or unit, h or unit
            if w * h > self.max_pixels or factor * min(width, height) < unit:
                w, h = (min(max(unit, side // min(width, height) * unit), most // unit * unit) for side in (width, height))
            return w, h
        w, h = (max(unit, round(side / unit) * unit) for side in (width, height))
        if w * h > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            w, h = (max(unit, math.floor(side / shrink / unit) * unit) for side in (width, height))
        elif w * h < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            w, h = (math.ceil(side * grow / unit) * unit for side in (width, height))
        return w, h


@dataclass(frozen=True)
class Picture:
    """An image of a request: pixels `[H, W, 3]` uint8, resized, and what a tower makes of it by name and size."""

    pixels: Array
    preparation: Preparation

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of its tokens."""
        unit = self.preparation.patch * self.preparation.merge
        return self.pixels.shape[0] // unit, self.pixels.shape[1] // unit

    @property
    def tokens(self) -> int:
        """Of the language model."""
        rows, columns = self.grid
        return rows * columns + (rows - 1) * self.preparation.breaks

    @property
    def placed(self) -> tuple[int, int]:
        """Rows and columns by which the language model tells its tokens' places."""
        return (1, self.tokens) if self.preparation.breaks else self.grid

    def digest(self) -> bytes:
        """Equal for equal pixels and preparation."""
        head = f"{self.pixels.shape} {self.preparation}".encode()
        return hashlib.blake2b(head + self.pixels.tobytes(), digest_size=32).digest()

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of its patches."""
        height, width = self.pixels.shape[:2]
        return height // self.preparation.patch, width // self.preparation.patch

    def put(self, values: Array) -> None:
        """Writes its patches to `[T, 3 * patch * patch]` float32; a row of groups at a time is what a core keeps near."""
        p, (rows, columns) = self.preparation, self.grid
        side, merge = p.patch, p.merge
        mean, std = (np.array(each, np.float32)[:, None] for each in (p.mean, p.std))
        moved = self.pixels.reshape(rows, merge, side, columns, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        made = values.reshape(rows, columns, merge, merge, 3, side, side)
        each = values.reshape(rows, -1, 3, side * side)
        for row in range(rows):
            made[row] = moved[row]
            each[row] /= np.float32(255)
            each[row] -= mean
            each[row] /= std

    def patches(self) -> Array:
        """`[T, 3 * patch * patch]` float32."""
        rows, columns = self.shape
        values = np.empty((rows * columns, 3 * self.preparation.patch**2), np.float32)
        self.put(values)
        return values


def places_of(rows: int, columns: int, merge: int) -> Array:
    """Row and column of each patch, `[rows * columns, 2]` int32, group by group."""
    at = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1).astype(np.int32)
    return in_groups(at, merge)


def in_groups(grid: Array, merge: int) -> Array:
    """`[rows, columns, ...]` as `[rows * columns, -1]`, group by group."""
    rows, columns = grid.shape[:2]
    groups = grid.reshape(rows // merge, merge, columns // merge, merge, -1).swapaxes(1, 2)
    return np.ascontiguousarray(groups.reshape(rows * columns, -1))
