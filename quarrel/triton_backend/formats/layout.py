"""What a block format consists of on the device: its planes, and how each kind of kernel decodes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import isfunction
from typing import Any, NamedTuple

import torch

from quarrel.gguf import GGMLType

Split = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Codes, bits, scale and top of some blocks; None for a plane that the format has not."""


@dataclass(frozen=True)
class Plane:
    """`count` entries of `dtype` in every run of `columns`."""

    dtype: torch.dtype
    count: int
    columns: int = 32

    def per_row(self, k: int) -> int:
        return self.count * (k // self.columns)


NIBBLES = Plane(torch.uint8, 16)
"""A byte holds columns j and j + 16 of a block of 32, so that a 16-byte load is a block."""
TWO_BITS, ONE_BIT = Plane(torch.int32, 2), Plane(torch.int32, 1)
ONE_SCALE, TWO_SCALES = Plane(torch.float16, 1), Plane(torch.float16, 2)
BYTE_SCALES = Plane(torch.uint8, 2)


class Dots(NamedTuple):
    """Integer products with one row of int8x2 activations (`dots.py`); of floats, their own products."""

    load: Any
    """jit (w, n, first, N, start, K, R, W, ASM): codes, upper bits, scales and tops of a tile."""
    products: Any
    """jit (FORMAT, q, upper, scales, tops, x, R, W, ASM): float32 whose sums over a row are the products with x."""
    word: int = 8
    """Columns to a word of codes: 8 of nibbles, 4 of bytes, 1 of floats."""
    views: tuple[torch.dtype | None, ...] = (torch.int32, None, None, None)
    """What `load` reads each plane as, where that is not its own type."""
    entry: int = 0
    """Columns to an entry of the codes so read, if not those of a word."""


class Float16(NamedTuple):
    """Decoding to float16 in few instructions (`float16.py`)."""

    decode: Any
    """jit (FORMAT, w, row, first, K, R, B): columns low and high, each `[R, B * 16]`."""
    contiguous: bool = False
    """The low columns are the first half of a tile; else they are the first 16 of every block."""


class Fragments(NamedTuple):
    """Decoding into the registers that `mma` and `wgmma` read (`fragments.py`, `wgmma_codes.py`)."""

    scales: Any
    """Gluon jit (FORMAT, w, at, up): upper bits a and b, scales s, tops t of blocks `at` and super-blocks `up`."""
    eight: Any
    """Gluon jit (FORMAT, q, a, b, s, t, word): the eight weights of a word of codes, in the order of their columns."""


class Ring(NamedTuple):
    """Decoding tiles in shared memory into the registers that `wgmma` reads (`ring_codes.py`, `ring_tiles.py`)."""

    factors: Any
    """Gluon jit (FORMAT, s, t, down): four words that `eight` multiplies by and adds, of scales s and tops t of blocks."""
    eight: Any
    """Gluon jit (FORMAT, q, r, a, b, c, d, u, v, word): eight weights of words q (and r, 16 columns on), by factors a to d
    and upper bits u and v."""
    shift: Callable[[torch.Tensor, torch.Tensor], int]
    """(scale, top): the power of two that a matrix's scales are divided by, so that factors fit float16."""


@dataclass(frozen=True, eq=False, repr=False)
class BlockFormat:
    """`split` makes the planes from raw blocks `[rows, blocks, nbytes]` uint8; every format has an exact decode.

    `codes` has a few bits for each value; `bits` the upper bits of codes that have more than four, `scale` one or two
    entries for 32 columns, `top` a few for 256.
    """

    type: GGMLType
    split: Callable[[torch.Tensor], Split]
    decode: Any
    """jit (FORMAT, w, row, block, row_ok, at, ok, K): columns low and high, `[R, B, 16]` float32 (`exact.py`)."""
    codes: Plane
    bits: Plane | None = None
    scale: Plane | None = None
    top: Plane | None = None
    dots: Dots | None = None
    float16: Float16 | None = None
    fragments: Fragments | None = None
    ring: Ring | None = None

    @property
    def planes(self) -> tuple[Plane | None, ...]:
        return (self.codes, self.bits, self.scale, self.top)

    def __repr__(self) -> str:
        """Enters the keys of compiled kernels, so that an edit of any of these functions makes them anew."""
        kernels = [self.decode, *(f for part in (self.dots, self.float16, self.fragments, self.ring) for f in (part or ()))]
        return f"{self.type.name} {[getattr(k, 'cache_key', k) for k in kernels if not isfunction(k)]}"
