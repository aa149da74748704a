"""A rank's part of a file's tensors: which ranges of an axis it holds, and how a kind of layer says so.

Columns are cut between blocks of 256 values where there are enough, else between the format's own blocks, so that packed
rows are never taken apart; the parts of two ranks may differ by a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quarrel.gguf import FORMATS, GGMLType
from quarrel.models.tensors import Tensors
from quarrel.ops.contract import Array, RawWeight, WeightRef

WIDE = 256
"""Columns that every kernel takes; the superblock of the k-quants."""

Range = tuple[int, int]


def even_range(units: int, rank: int, ranks: int) -> Range:
    """A rank's part of so many units: equal, or one more for the first ranks."""
    each, more = divmod(units, ranks)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def aligned_range(rows: int, rank: int, ranks: int) -> Range:
    """A rank's part of the rows of a matrix, which begins at a multiple of 64 or 32 where the rows allow it."""
    unit = next(u for u in (64, 32, 1) if rows % u == 0 and rows // u >= ranks)
    start, stop = even_range(rows // unit, rank, ranks)
    return start * unit, stop * unit


@dataclass(frozen=True)
class Cut:
    """The ranges of one axis (counted from the last) that a rank holds; `total` is the axis in the file."""

    axis: int
    total: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


class Cutter:
    """Cuts the tensors of one layer, named without its prefix, for one rank. What the file does not have is left out."""

    def __init__(self, tensors: Tensors, prefix: str, n_embd: int, rank: int, ranks: int) -> None:
        self.n_embd, self.rank, self.ranks = n_embd, rank, ranks
        self.cuts: dict[str, Cut] = {}
        self._tensors, self._prefix = tensors, prefix

    def has(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(self._prefix + name)

    def elements(self, name: str) -> int:
        """Columns that are only cut together: a block of the tensor's format."""
        type = self._tensors.file.tensors[self._prefix + name].type if self.has(name) else GGMLType.F32
        return FORMATS[type].elements

    def portion(self, width: int, each: int, *names: str) -> Range | None:
        """A part of `width` in units of `each`, cut between blocks of the columns of these tensors; None if too few."""
        block = math.lcm(*(self.elements(n) for n in names))
        for unit in (math.lcm(each, block, WIDE), math.lcm(each, block)):
            if width % unit == 0 and width // unit >= self.ranks:
                start, stop = even_range(width // unit, self.rank, self.ranks)
                return start * unit, stop * unit
        return None

    def axis(self, name: str, axis: int, total: int, *ranges: Range) -> None:
        """These ranges of an axis, counted from the last, which is `total` long in the file."""
        if self.has(name):
            self.cuts[self._prefix + name] = Cut(axis, total, ranges)

    def rows(self, name: str, total: int, *ranges: Range) -> None:
        """These outputs of a map, and of its bias."""
        self.axis(f"{name}.weight", -2, total, *ranges)
        self.axis(f"{name}.bias", -1, total, *ranges)

    def columns(self, name: str, total: int, *own: Range) -> None:
        """These inputs of a map, so that each rank has a part of a sum; rank 0 alone adds its bias."""
        self.axis(f"{name}.weight", -1, total, *own)


class CutTensors(Tensors):
    """A rank's part of every tensor, in the shapes of its spec; also the `WeightSource` of these parts."""

    def __init__(self, tensors: Tensors, cuts: dict[str, Cut], rank: int, ranks: int) -> None:
        super().__init__(tensors.file)
        self.rank, self.ranks = rank, ranks
        self._cuts = cuts
        self._files_name: dict[str, str] = {}

    def optional(self, name: str, *shape: int) -> WeightRef | None:
        found = super().optional(name, *shape)
        weight = self._cuts.get(name.removesuffix(".bias") + ".weight")
        once = self.rank != 0 and weight is not None and weight.axis == -1
        return None if once else found

    def sums(self, ref: WeightRef) -> bool:
        """Whether a product with this matrix is a part of a sum over the ranks: its columns are cut."""
        cut = self._cuts.get(self._files_name.get(ref.name, ""))
        return cut is not None and cut.axis == -1

    def columns(self, ref: WeightRef) -> Range:
        """Which columns of the file's matrix, of `uncut(ref).k`, this rank has."""
        (own,) = self._cuts[self._files_name[ref.name]].ranges
        return own

    def uncut(self, ref: WeightRef) -> WeightRef:
        """All columns of what `sums`."""
        name = self._files_name[ref.name]
        return replace(ref, name=name, k=self._cuts[name].total)

    def raw(self, ref: WeightRef) -> RawWeight:
        """The rows' blocks: in place in the mapping where the rank's rows are, copied where columns are cut."""
        name = self._files_name.get(ref.name)
        if name is None:
            return super().raw(ref)
        cut, block = self._cuts[name], FORMATS[ref.type]
        shape = self.file.tensors[name].shape
        whole = self.file.raw(name).reshape(*shape[:-1], -1)
        row_bytes = ref.k // block.elements * block.nbytes
        if cut.axis == -1 or len(shape) > 2:
            ranges: Sequence[Range] = cut.ranges
            if cut.axis == -1:
                ranges = [(a // block.elements * block.nbytes, z // block.elements * block.nbytes) for a, z in ranges]
            rows = _join(whole, cut.axis, ranges).reshape(-1, row_bytes)
            return RawWeight(ref.type, rows[ref.start : ref.start + ref.rows], ref.k)
        return RawWeight(ref.type, _join(whole, 0, _within(cut.ranges, ref.start, ref.start + ref.rows)), ref.k)

    def _ref(self, name: str, shape: tuple[int, ...]) -> WeightRef:
        cut = self._cuts.get(name)
        if cut is None:
            return super()._ref(name, shape)
        assert shape[cut.axis] == cut.size, (name, shape, cut)
        whole = list(shape)
        whole[cut.axis] = cut.total
        ref = super()._ref(name, tuple(whole))
        part = f"{name}[{self.rank}/{self.ranks}]"
        self._files_name[part] = name
        return WeightRef(part, ref.type, shape[0] if len(shape) == 2 else 1, shape[-1])


def _join(array: Array, axis: int, ranges: Sequence[Range]) -> Array:
    """These ranges of an axis, end to end; a view where there is one."""
    index: list[slice] = [slice(None)] * array.ndim
    parts = []
    for start, stop in ranges:
        index[axis] = slice(start, stop)
        parts.append(array[tuple(index)])
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


def _within(ranges: Sequence[Range], start: int, stop: int) -> list[Range]:
    """What lies at `start` to `stop` of the ranges put end to end."""
    found, at = [], 0
    for a, z in ranges:
        low, high = max(start - at, 0), min(stop - at, z - a)
        if low < high:
            found.append((a + low, a + high))
        at += z - a
    return found
