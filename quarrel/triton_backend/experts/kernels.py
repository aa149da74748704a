"""The kernels of products with the chosen experts, best first: what each takes, or why it declines.

What `linear/kernels.py` is for linear maps. A launch asks in this order which one serves its number of pairs of a token and
an expert. One row of x has matvecs of its own (`matvec.py`).
"""

from __future__ import annotations

from quarrel.triton_backend.experts import decoded, grouped, ring, tiles
from quarrel.triton_backend.experts.maps import ExpertMaps, Grouping, Serves
from quarrel.triton_backend.linear.maps import UNLIMITED
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.kernel import Kernel, choose
from quarrel.triton_backend.runtime.site import Site

KERNELS: tuple[Kernel[ExpertMaps, Serves], ...] = (
    Kernel("ring", ring.declines, ring.build),
    Kernel("grouped", grouped.declines, grouped.build),
    Kernel("decoded", decoded.declines, decoded.build),
    Kernel("exact tiles", tiles.declines, tiles.build),
)
BOUNDED = KERNELS[:2]
"""For stacks with a bound of pairs."""


class ByPairs:
    """A product by the kernels that take it."""

    def __init__(self, site: Site, maps: ExpertMaps) -> None:
        self._serves, self.declined = choose(KERNELS if maps.most is None else BOUNDED, site, maps)

    def __call__(self, y: Slot, x: Slot, group: Grouping, pairs: int, per_token: int) -> None:
        """y `[pairs, n]` from rows of x `[tokens, k]`, of which `per_token` pairs share one."""
        serves = next(s for _, s in self._serves if pairs <= s.most)
        if not group.known:
            group.listed.items = None
            if pairs > serves.groups:
                group.fill(pairs)
                group = group._replace(known=True)
        serves.run(y, x, group, pairs, per_token)

    def describe(self) -> str:
        """Which kernels serve how many pairs: `ring to 3072 pairs, grouped from 3073 pairs`."""
        parts, first = [], 1
        for name, serves in self._serves:
            if serves.most < first:  # one before it serves as many
                continue
            if serves.most >= UNLIMITED:
                return ", ".join([*parts, name + (f" from {first} pairs" if parts else "")])
            parts.append(f"{name} to {serves.most} pairs")
            first = serves.most + 1
        raise AssertionError("the last kernel serves any number of pairs")
