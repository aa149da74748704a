"""The kernels of products with the chosen experts, best first: what each takes, or why it declines.

What `linear/kernels.py` is for linear maps. A launch asks in this order which one serves its number of pairs of a token and
an expert. One row of x has matvecs of its own (`matvec.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quarrel.triton_backend.experts import grouped, ring, tiles
from quarrel.triton_backend.experts.maps import ExpertMaps, Serves
from quarrel.triton_backend.linear.maps import UNLIMITED
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.site import Site


@dataclass(frozen=True)
class ExpertKernel:
    """`declines` returns None to take maps on a device, or a sentence; `build` makes the product."""

    name: str
    declines: Callable[[Site, ExpertMaps], str | None]
    build: Callable[[Site, ExpertMaps], Serves]


KERNELS = (
    ExpertKernel("ring", ring.declines, ring.build),
    ExpertKernel("grouped", grouped.declines, grouped.build),
    ExpertKernel("exact tiles", tiles.declines, tiles.build),
)


class ByPairs:
    """A product by the kernels that take it."""

    def __init__(self, site: Site, maps: ExpertMaps) -> None:
        self._serves: list[tuple[str, Serves]] = []
        self.declined: list[str] = []
        """A sentence for each kernel that does not take it."""
        for kernel in KERNELS:
            if self._serves and self._serves[-1][1].most >= UNLIMITED:
                break
            reason = kernel.declines(site, maps)
            if reason is None:
                self._serves.append((kernel.name, kernel.build(site, maps)))
            else:
                self.declined.append(f"{kernel.name}: {reason}")

    def __call__(self, y: Slot, x: Slot, order: Slot, starts: Slot, pairs: int, per_token: int) -> None:
        """y `[pairs, n]` from rows of x `[tokens, k]`, of which `per_token` pairs share one."""
        next(s for _, s in self._serves if pairs <= s.most).run(y, x, order, starts, pairs, per_token)

    def describe(self) -> str:
        """Which kernels serve how many pairs: `ring to 3072 pairs, grouped from 3073 pairs`."""
        parts, first = [], 1
        for name, serves in self._serves:
            least, most = f" from {first} pairs" if first > 1 else "", f" to {serves.most} pairs"
            parts.append(name + (most if serves.most < UNLIMITED else least))
            first = serves.most + 1
        return ", ".join(parts)
