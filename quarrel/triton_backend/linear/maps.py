"""What linear kernels are asked to compute, and what one of them serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quarrel.triton_backend.linear.left_parts import LeftParts
from quarrel.triton_backend.runtime.arrays import Packed, Slot
from quarrel.triton_backend.runtime.site import Batch, Launch

Arrange = Callable[[Slot, Batch, int], None]
"""Puts the result of a norm where kernels of a width of rows read it: `fragments.arrange`, `wgmma_x.arrange`, and for a
width of 0 `ring_x.arrange`, of as many rows as there are."""
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Maps:
    """Maps of one x `[rows, k]`: y = W x + bias each, residual + alpha * that, or activation(gate x) * up x.

    Where x is the result of a norm, `norm` launches that, and `arrange`, if there is one, can take its place.
    """

    x: Slot
    ys: Sequence[Slot]
    """Of each map `[rows, n]`; of gate and up the one result."""
    weights: Sequence[Packed]
    biases: Sequence[torch.Tensor | None]
    axis: str
    """The free axis of x."""
    residual: Slot | None = None
    alpha: float = 1.0
    activation: str = "none"
    """Of the gate, where the maps are gate and up, which have one format and shape, both or none a bias."""
    left: LeftParts | None = None
    """Where parts of K may be left, if the norm behind these maps adds them."""
    norm: Launch | None = None
    arrange: Arrange | None = None
    matvec: Launch | None = None
    """The maps of one row, with their norm (`matvec.py`)."""

    @property
    def gated(self) -> bool:
        return self.activation != "none"

    @property
    def given(self) -> tuple[torch.Tensor, ...]:
        """The biases that there are."""
        return tuple(b for b in self.biases if b is not None)

    def together(self) -> str | None:
        """Why one launch does not compute them all, or None."""
        if self.gated or len(self.weights) == 1 or (len(self.weights) == 3 and len(self.given) in (0, 3)):
            return None
        return f"needs one map, three with biases or without, or gate and up, got {len(self.weights)} maps"


class Serves(NamedTuple):
    """A launch for `least` to `most` rows; `norms` if it computes the norm before the maps too."""

    run: Launch
    least: int
    most: int
    norms: bool = False
