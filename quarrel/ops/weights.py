"""What every backend that keeps copies of the weights needs to know of them, before and while it loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from quarrel.gguf import FORMATS, GGMLType
from quarrel.ops.contract import Array, RawWeight, WeightRef
from quarrel.ops.draw import as_float_type
from quarrel.ops.program import Node
from quarrel.ops.step import WeightSource


def weights_of(nodes: Iterable[Node]) -> list[WeightRef]:
    """Every weight, once, in order of use."""
    return list(dict.fromkeys(ref for node in nodes for ref in node.inputs if isinstance(ref, WeightRef)))


def file_bytes(ref: WeightRef) -> int:
    """Bytes of the rows in the file."""
    block = FORMATS[ref.type]
    return ref.rows * (ref.k // block.elements) * block.nbytes


def rows_as(source: WeightSource, ref: WeightRef, target: GGMLType) -> Callable[[int, int], Array]:
    """Gives rows `start` to `stop` of a weight as raw blocks of `target`, which is its own type or a float one."""
    raw = source.raw(ref)

    def read(start: int, stop: int) -> Array:
        rows = RawWeight(raw.type, raw.raw[start:stop], raw.k)
        return rows.raw if raw.type == target else as_float_type(rows.dense(), target)

    return read


class Given:
    """The source of weights that came with a call, by name."""

    def __init__(self, weights: Mapping[str, RawWeight]) -> None:
        self._weights = weights

    def raw(self, ref: WeightRef) -> RawWeight:
        return self._weights[ref.name]


class Loading:
    """How many bytes of the file are loaded; `progress` hears those done and those in all."""

    def __init__(self, refs: Iterable[WeightRef], progress: Callable[[int, int], None] | None) -> None:
        self._waiting, self._progress = set(refs), progress
        self._whole, self._done = sum(map(file_bytes, self._waiting)), 0

    def have(self, ref: WeightRef) -> None:
        """Says that this weight is loaded; only the first time counts."""
        if ref in self._waiting:
            self._waiting.remove(ref)
            self._done += file_bytes(ref)
            if self._progress is not None:
                self._progress(self._done, self._whole)
