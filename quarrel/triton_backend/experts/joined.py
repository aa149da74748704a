"""The shared expert as more of the chosen ones, for a few rows: each row has it too, with a weight of 1 or its own gate.

One ring then computes all experts of a layer, where the shared one had two to nine launches of its own. Its matrices lie
behind those of the others (`formats/weights.py: beside`). One that is `more` times as wide as the others is as many
experts: rows of gate and up divide by themselves, but columns of down have to lie part by part there, in a copy (read so
for one row, too, they cost 3 % of a step of Granite-4-h-tiny on an H100, 2026-11-28).

Products of 8 / 32 rows with the shared expert's behind the others cost 3 / 17 us more in a layer of Nemotron and 2 / 6 in
one of Granite-4-h-tiny on an H200 (2026-11-27); by themselves, with launches between, they took 23 / 24 and 13 / 18.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quarrel.ops.contract import Value, WeightRef
from quarrel.ops.moe import ExpertDownSpec, ExpertUpSpec
from quarrel.ops.program import Node
from quarrel.triton_backend.experts.experts import Sum, build_mix, group_launch
from quarrel.triton_backend.experts.kernels import ByPairs
from quarrel.triton_backend.experts.maps import ExpertMaps, Grouping
from quarrel.triton_backend.experts.route import More
from quarrel.triton_backend.formats.table import RING
from quarrel.triton_backend.formats.weights import fit_beside
from quarrel.triton_backend.linear.ring import declines_device
from quarrel.triton_backend.runtime.arrays import DTYPES, Packed, Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED
from quarrel.triton_backend.runtime.site import Batch, Launch, Listed, Site, starts_early

LEAST, ROWS = 2, 32
"""Rows for which experts are joined: with more the shared one's items are so many that a product of its own is shorter."""
_WHOLE = 16
"""Of how many rows each matrix is a multiple: then the ring reads stacks of any format (`ring_weights.rows_of_stack`)."""


def joins(site: Site) -> bool:
    """Whether this device computes experts so: where the ring runs."""
    return INTERPRETED or declines_device(site) is None


@dataclass(frozen=True)
class Joined:
    """The nodes of a layer's experts."""

    route: Node
    up: Node
    down: Node
    shared_maps: Sequence[Node]
    """Gate and up, or up alone."""
    activation: Node
    shared_down: Node
    rate: Value | None = None
    """Whose sigmoid is the shared expert's weight."""
    add: Node | None = None
    """Of the sum to a stream."""

    @property
    def more(self) -> int:
        """Experts that the shared one is."""
        return int(self.shared_maps[0].spec.n // self.up.spec.n)

    def fits(self) -> bool:
        """Whether their weights can lie so, and activations are the same."""
        up, down = self.up.spec, self.down.spec
        first, last = self.shared_maps[0].spec, self.shared_down.spec.linear
        formats = {ref.type for ref in self._stacks}
        return (
            not (up.bias or down.bias or first.bias or last.bias)
            and self.shared_down.spec.scale == 1.0
            and up.activation == self.activation.spec.activation
            and len(self.shared_maps) == 1 + up.gated
            and all(n.spec == first and n.inputs[0] is self.up.inputs[0] for n in self.shared_maps)
            and first.n % up.n == up.n % _WHOLE == down.n % _WHOLE == 0
            and (last.n, last.k) == (down.n, first.n)
            and len(formats) == 1
            and {*(t.name for t in formats), down.type.name} <= set(RING)
            and all(fit_beside(refs, parts) for refs, parts in self._pairs)
        )

    def describe(self) -> str:
        """For `explain`."""
        return f"{LEAST} to {ROWS} rows with the shared expert as {self.more} more of the chosen"

    def pack(self, site: Site) -> None:
        """Before any of the weights is packed."""
        for refs, parts in self._pairs:
            site.beside(refs, parts)

    def more_of(self, site: Site) -> More:
        """Where the router leaves all choices."""
        used = self.up.spec.used + self.more
        ids = site.lasting("ids", ROWS * used, torch.int32)
        return More(ids, site.lasting("shares", ROWS * used, torch.float32), self.more)

    def build(self, site: Site) -> Launch:
        """All behind the router."""
        first: ExpertUpSpec = self.up.spec
        second: ExpertDownSpec = self.down.spec
        used, experts = first.used + self.more, first.n_experts + self.more
        chosen, last = self.more_of(site), self.shared_down if self.add is None else self.add
        x = site.slot(self.up.inputs[0])  # type: ignore[arg-type]
        stacks = [_whole(site, ref) for ref in self._stacks]
        up = ByPairs(site, ExpertMaps(stacks, [], experts, used, first.activation, ROWS * used))
        down = ByPairs(site, ExpertMaps([_whole(site, self._down)], [], experts, used, "none", ROWS * used))
        y = site.scratch("one", ROWS * used * first.n, DTYPES[site.compute])
        rows = site.scratch("one", ROWS * used * second.n)
        group = _grouping(site, chosen.ids, experts, ROWS * used)
        rate = None if self.rate is None else site.slot(self.rate)
        stream, scale = (None, 1.0) if self.add is None else (site.slot(self.add.inputs[0]), self.add.spec.scale)  # type: ignore[arg-type]
        mix = build_mix(
            site, Sum(rows, chosen.weights, used, second.n, rate), site.slot(last.outputs[0]), stream, scale
        )  # fmt: skip

        def run(batch: Batch) -> None:
            pairs = batch.T * used
            up(y, x, group, pairs, used)
            down(rows, y, group._replace(known=True), pairs, 1)
            mix(batch)

        return run

    @property
    def _stacks(self) -> list[WeightRef]:
        return list(self.up.inputs[2 : 3 + self.up.spec.gated])  # type: ignore[arg-type]

    @property
    def _down(self) -> WeightRef:
        return self.down.inputs[3]  # type: ignore[return-value]

    @property
    def _pairs(self) -> list[tuple[list[WeightRef], int]]:
        """Stacks, what lies behind each, and in how many parts."""
        own: list[WeightRef] = [node.inputs[1] for node in self.shared_maps]  # type: ignore[misc]
        pairs = [([stack, ref], 1) for stack, ref in zip(self._stacks, own, strict=True)]
        return [*pairs, ([self._down, self.shared_down.inputs[2]], self.more)]  # type: ignore[list-item]


def _whole(site: Site, ref: WeightRef) -> Packed:
    whole = site.weight(ref).whole
    assert whole is not None, ref
    return whole


def _grouping(site: Site, ids: Slot, experts: int, pairs: int) -> Grouping:
    order, starts = (site.scratch("one", size, torch.int32) for size in (pairs, experts + 1))

    def fill(count: int) -> None:
        group_launch(site.launch, order.tensor, starts.tensor, ids.tensor, count, experts, starts_early(site))

    return Grouping(order, starts, ids, False, fill, Listed())
