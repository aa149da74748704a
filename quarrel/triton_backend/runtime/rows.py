"""Rows that stay on the device where a step made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quarrel.ops.contract import Array


class DeviceRows:
    """See `ops.step.Rows`: a tensor `[rows, width]`, read by steps that are launched after the one that fills it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor], behind: tuple[int, Array] | None) -> DeviceRows:
        """A copy of these, side by side, in float32. behind: what follows each so many rows but the last of them."""
        rows = torch.cat(list(parts), 1).float()
        if behind is not None:
            columns, more = behind
            grid = rows.view(-1, columns, rows.shape[1])
            last = torch.from_numpy(np.array(more, np.float32)).to(rows.device).view(1, 1, -1).expand(len(grid), 1, -1)
            rows = torch.cat([grid, last], 1).view(-1, rows.shape[1])[:-1]
        return cls(rows)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, part: slice) -> DeviceRows:
        return DeviceRows(self.tensor[part])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Waits for them."""
        return np.array(self.tensor.cpu().numpy(), dtype, copy=copy)
