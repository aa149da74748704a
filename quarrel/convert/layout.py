"""How the values of a folder's tensors become the rows of a GGUF tensor: cut, ordered and scaled piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quarrel.convert.config import Config
from quarrel.convert.mlx import Coding
from quarrel.gguf import GGMLType

View = Callable[[np.ndarray, Config], np.ndarray]
"""Another order of an array's elements or a part of them, not copied where NumPy can: then it costs nothing to make."""
Change = Callable[[np.ndarray, int], np.ndarray]
"""Rows of float32 values [n, k], and which row of the tensor is the first -> other values."""


class Source(Protocol):
    """What holds a folder's tensors."""

    def bits(self, name: str) -> np.ndarray:
        """As stored; bits where NumPy has no such type."""
        ...

    def floats(self, name: str, view: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """A view of its values in float32, or float16 where they are so."""
        ...


@dataclass(frozen=True)
class Part:
    """Rows of a tensor, in the order in which `view` gives the elements of a stored one."""

    name: str
    view: View
    rows: int


@dataclass(frozen=True)
class Weight:
    """A GGUF tensor to be made: `shape` row-major, `type` as it is made where nobody asks for another one."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    change: Change | None = None
    constant: np.ndarray | None = None
    """Its values, where no stored tensor has them."""
    coding: Coding | None = None
    """How codes are stored, if `parts` are such."""
    scales: tuple[Part, ...] = ()
    biases: tuple[Part, ...] = ()
    """Beside the codes, part by part."""

    @property
    def k(self) -> int:
        return self.shape[-1]


def cut(array: np.ndarray, first: int, last: int, k: int) -> np.ndarray:
    """Rows of `k` elements of an array of any shape, [last - first, k]; reads and copies no more than those."""
    if array.size == k * (last - first):
        return array.reshape(last - first, k)
    each = array.size // array.shape[0] // k  # rows in an element of the first axis
    if each == 1:
        return array[first:last].reshape(-1, k)
    parts = range(first // each, -(-last // each))
    cuts = [cut(array[i], max(first - i * each, 0), min(last - i * each, each), k) for i in parts]
    return cuts[0] if len(cuts) == 1 else np.concatenate(cuts)


def pieces(parts: Sequence[Part], first: int, last: int) -> list[tuple[Part, int, int]]:
    """The parts that rows `first` to `last` lie in, each with the rows of its own."""
    found, at = [], 0
    for part in parts:
        if at < last and first < at + part.rows:
            found.append((part, max(first - at, 0), min(last - at, part.rows)))
        at += part.rows
    return found


def same(a: np.ndarray, c: Config) -> np.ndarray:
    return a


def squeezed(a: np.ndarray, c: Config) -> np.ndarray:
    return a.reshape([n for n in a.shape if n != 1])


def column(a: np.ndarray, c: Config) -> np.ndarray:
    return a.reshape(-1, 1)


def transposed(a: np.ndarray, c: Config) -> np.ndarray:
    return a.swapaxes(-1, -2)


def wide_along(axis: int) -> View:
    """With the model's width along this axis, -1 or -2; where both are as long, with columns for rows."""

    def view(a: np.ndarray, c: Config) -> np.ndarray:
        width = c.integer("hidden_size")
        return a if a.shape[axis] == width != a.shape[-3 - axis] else transposed(a, c)

    return view


def interleaved(heads: Callable[[Config], int]) -> View:
    """Rows of a rotation that pairs i with i + n / 2, for one that pairs neighbours."""

    def view(a: np.ndarray, c: Config) -> np.ndarray:
        n = heads(c)
        return a.reshape(n, 2, a.shape[0] // n // 2, *a.shape[1:]).swapaxes(1, 2)

    return view


def nth(i: int, n: int, inner: View = same) -> View:
    """The i-th of n equal runs of rows."""

    def view(a: np.ndarray, c: Config) -> np.ndarray:
        a = inner(a, c)
        if a.shape[-2] % n:
            raise ValueError
        step = a.shape[-2] // n
        return a[..., i * step : (i + 1) * step, :]

    return view


def every(i: int, n: int, inner: View = same, axis: int = -2) -> View:
    """Each n-th row from the i-th."""

    def view(a: np.ndarray, c: Config) -> np.ndarray:
        moved = np.moveaxis(inner(a, c), axis, 0)[i::n]
        return np.moveaxis(moved, 0, axis)

    return view


def span(start: Callable[[Config], int], stop: Callable[[Config], int | None]) -> View:
    """Rows `start` to `stop`."""
    return lambda a, c: a[start(c) : stop(c)]
