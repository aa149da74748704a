"""What kernels of experts are asked to compute, and what one of them serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quarrel.triton_backend.linear.maps import UNLIMITED
from quarrel.triton_backend.runtime.arrays import Packed, Slot
from quarrel.triton_backend.runtime.site import Listed


@dataclass(frozen=True)
class ExpertMaps:
    """A matrix `[n, k]` of each expert, or a gate and an up matrix of one format and what joins them."""

    stacks: Sequence[Packed]
    biases: Sequence[torch.Tensor]
    """None, or one for each stack, `[n_experts, n]` float32."""
    n_experts: int
    used: int
    """Experts of a token."""
    activation: str
    most: int | None = None
    """Pairs, where there are never more: then nothing is decoded beside the stacks."""

    @property
    def gated(self) -> bool:
        return len(self.stacks) == 2

    @property
    def n(self) -> int:
        return self.stacks[0].n // self.n_experts

    @property
    def k(self) -> int:
        return self.stacks[0].k


class Grouping(NamedTuple):
    """The pairs by expert."""

    order: Slot
    starts: Slot
    ids: Slot
    known: bool
    """Whether order and starts are filled; else `fill` does so for a number of pairs, or the product does."""
    fill: Callable[[int], None]
    listed: Listed


Product = Callable[[Slot, Slot, Grouping, int, int], None]
"""y `[pairs, n]` from rows of x, of which so many pairs share one: y, x, the pairs by expert, how many, and that number."""


class Serves(NamedTuple):
    """A product of up to `most` pairs of a token and an expert."""

    run: Product
    most: int = UNLIMITED
    groups: int = 0
    """Pairs up to which it fills order and starts itself."""
