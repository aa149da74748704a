"""The largest of a long row, found by the maxima of small groups: what is drawn from is seldom more than a hundred numbers.

Number i belongs to group i % width, so that the maxima are 31 comparisons of long rows. If the `count` largest maxima reach
down to `edge`, so many numbers at least are as large, and all that are lie in groups whose maximum is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DEPTH = 32
"""Numbers of a group: of 128,000 logits 4,000 maxima are left (16 is no quicker, 64 takes three times as long)."""
LEAST = 4096
"""Rows shorter than that are looked at as a whole."""


class Peaks:
    """Of a row `[V]`."""

    def __init__(self, row: Array) -> None:
        self._row, self._width = row, len(row) // DEPTH if len(row) >= LEAST else 0
        if self._width:
            whole = self._width * DEPTH
            self._groups, rest = row[:whole].reshape(DEPTH, self._width), row[whole:]
            self._tops = self._groups.max(0)
            # What is left belongs to the first groups, and is looked at in any case.
            np.maximum(self._tops[: len(rest)], rest, out=self._tops[: len(rest)])
        self.top = float((self._tops if self._width else row).max()) if len(row) else float("-inf")
        """The largest; NaN if there is one."""

    def largest(self, count: int) -> Array | None:
        """Ids, ascending, of all that reach some value, which `count` of them at least do. None where that would be too
        many, or some are infinite or no numbers."""
        if not 0 < count <= self._width // 2 or not np.isfinite(self.top):
            return None
        edge = np.partition(self._tops, self._width - count)[self._width - count]
        if edge == -np.inf:
            return None
        groups = np.flatnonzero(self._tops >= edge)
        depth, at = np.divmod(np.flatnonzero(self._groups[:, groups] >= edge), len(groups))
        ids: Array = depth * self._width + groups[at]
        whole = self._width * DEPTH
        return ids if whole == len(self._row) else np.append(ids, whole + np.flatnonzero(self._row[whole:] >= edge))
