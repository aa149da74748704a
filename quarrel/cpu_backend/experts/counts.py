"""Which experts were chosen how often: routing notes its choices, and each step adds them up in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quarrel.ops.moe import RouteSpec


class ExpertCounts:
    """Choices of a step, `[layers, tokens, used]`, and their sums over all steps, `[layers, n_experts + 1]`.

    The last expert is nobody: it stands where a layer uses fewer experts than another.
    """

    def __init__(self, specs: Sequence[RouteSpec], tokens: int) -> None:
        self.used = max((s.used for s in specs), default=0)
        self._bins = 1 + max((s.n_experts for s in specs), default=0)
        self._sizes = [s.n_experts for s in specs]
        self._log = np.full((len(specs), tokens, self.used), self._bins - 1, np.int32)
        self._first = np.arange(len(specs), dtype=np.int64)[:, None, None] * self._bins
        self._sums = np.zeros(len(specs) * self._bins, np.int64)
        self._paths: list[str] = []

    def begin(self, path: str) -> int:
        """Address of the next layer's choices."""
        self._paths.append(path)
        return int(self._log[len(self._paths) - 1].ctypes.data)

    def add(self, tokens: int) -> None:
        """Counts the choices of so many tokens."""
        if self._paths:
            self._sums += np.bincount((self._log[:, :tokens] + self._first).reshape(-1), minlength=len(self._sums))

    def counts(self) -> dict[str, np.ndarray]:
        """int64 `[n_experts]` by path."""
        if not self._sizes:
            return {}
        rows = self._sums.reshape(len(self._sizes), -1)
        return {path: row[:size].copy() for path, row, size in zip(self._paths, rows, self._sizes, strict=True)}
