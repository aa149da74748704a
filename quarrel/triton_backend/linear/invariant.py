"""Linear maps whose rows have the same bits in any number (`deterministic`), by the ring of TMA copies (`ring.py`).

`wgmma` adds a column's products in one order whatever the other columns are, so rows of x to an item may follow from
their number. The parts of K may not: each weight has those that suit 128 rows. Few rows leave the parts' sums to a second
launch; with many a program adds them itself, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quarrel.triton_backend.elementwise import ring_x
from quarrel.triton_backend.linear import ring, ring_sums
from quarrel.triton_backend.linear.maps import UNLIMITED, Maps, Serves
from quarrel.triton_backend.linear.matmul import Epilogue
from quarrel.triton_backend.linear.ring import WIDTHS, Cut, Ending, Product, Rows
from quarrel.triton_backend.runtime.arrays import Packed, Slot
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Batch, Site, starts_early

AT_ONCE = 1024
"""Rows of x of one launch, so that they stay in the cache between the tiles of a weight."""
_WIDEST = 128
_MOST_PARTS = 8
_COLUMNS = 1024


class Plan(NamedTuple):
    """How a number of rows is computed; `apart` if parts of K are units of their own."""

    cut: Cut
    apart: bool


def widths(format: str) -> tuple[int, ...]:
    """Rows of x to an item."""
    # In a trial kernel 128 rows of x gave wrong sums with MXFP4; nobody has found out why.
    return WIDTHS if format == "MXFP4" else (*WIDTHS, _WIDEST)


def parts_for(tiles: int, steps: int, programs: int) -> int:
    """Parts of K of a weight with so many tiles, each of so many steps: those with which an item takes least time."""
    most = max(1, min(_MOST_PARTS, steps, cdiv(programs, tiles)))
    return min(range(1, most + 1), key=lambda parts: cdiv(tiles * parts, programs) * (cdiv(steps, parts) + 1))


def plan_for(count: int, tiles: int, steps: int, parts: int, programs: int, format: str) -> Plan:
    """Parts apart where that takes less time: steps of the longest program, and one for each end of a unit."""
    cut = Cut.of(next((w for w in widths(format) if count <= w), widths(format)[-1]))
    units, room = tiles * cdiv(count, cut.width), cut.residents * programs
    apart = cdiv(units * parts, room) * (cdiv(steps, parts) + 1)
    # Registers for two sums are there where a multiprocessor has one program.
    return Plan(cut, parts > 1 and (cut.residents > 1 or apart < cdiv(units, room) * (steps + 1)))


def most_apart(tiles: int, steps: int, parts: int, programs: int, format: str) -> int:
    """The most rows of a launch whose parts are apart."""
    width = widths(format)[-1]
    ends = (*widths(format), *range(width, AT_ONCE + 1, width))  # the most rows of each plan
    return max((n for n in ends if plan_for(n, tiles, steps, parts, programs, format).apart), default=0)


def pieces(count: int) -> list[tuple[int, int]]:
    """First row and rows of each launch: as few as there can be, of nearly one size, in whole items."""
    if count == 0:
        return []
    each = cdiv(cdiv(count, cdiv(count, AT_ONCE)), _WIDEST) * _WIDEST
    return [(first, min(each, count - first)) for first in range(0, count, each)]


def declines(site: Site, maps: Maps) -> str | None:
    """Takes what the ring reads, where a step is deterministic."""
    if not site.deterministic:
        return "a step need not be deterministic"
    if (reason := ring.declines_device(site) or ring.declines_weights(maps.weights)) is not None:
        return reason
    if maps.gated and len({w.format for w in maps.weights}) > 1:
        return "needs gate and up of one format"
    return None


def build(site: Site, maps: Maps) -> Serves:
    return Serves(_Maps(site, maps), 0, UNLIMITED, maps.arrange is not None)


class _One:
    """A matrix, gate and up, or three maps in one matrix: what follows once x is in order."""

    def __init__(
        self, site: Site, maps: Maps, ys: Sequence[Slot], weights: Sequence[Packed], biases: Sequence[torch.Tensor]
    ) -> None:
        self._site, self._maps, self._ys, self._biases = site, maps, ys, biases
        self._ns = tuple(w.n for w in weights) if len(ys) == 3 else ()
        whole = ring.as_one(weights) if self._ns else None
        made = weights if whole is None else [whole]
        self._n, self._format = made[0].n, made[0].format
        given = [torch.cat([b.view(-1) for b in biases])] if self._ns and biases else biases
        self._product = product = Product(site, made, self._n, maps.activation, given)
        self._steps, self._programs = product.padded // 256, product.multiprocessors
        self._tiles = product.tiles(Cut.of(_WIDEST))  # as with every width
        self._parts = 1 if maps.gated else parts_for(self._tiles, self._steps, self._programs)
        most = most_apart(self._tiles, self._steps, self._parts, self._programs, self._format)
        self._sums = site.scratch("one", max(1, self._parts * most * self._n))

    def plan(self, count: int) -> Plan:
        return plan_for(count, self._tiles, self._steps, self._parts, self._programs, self._format)

    def __call__(self, arranged: torch.Tensor, first: int, count: int) -> None:
        """So many rows of the results from `first` on; x is in order."""
        site, maps, product, n = self._site, self._maps, self._product, self._n
        plan = self.plan(count)
        x = product.rows(arranged, arranged.numel() // product.padded, plan.cut.width)
        rows = Rows(x, x.base, x.base, count)
        ys = tuple(y.tensor[first * width :] for y, width in zip(self._ys, self._ns or (n,), strict=True))
        residual = None if maps.residual is None else maps.residual.tensor[first * n :]
        if not plan.apart:
            product.launch(ys[0], rows, plan.cut, ending=Ending(self._parts, residual, maps.alpha, ys[1:], self._ns))
            return
        sums, stride, early = self._sums.tensor, count * n, starts_early(site)
        product.launch(sums, rows, plan.cut, self._parts, stride)
        biases = tuple(self._biases)
        if self._ns:
            firsts = (0, self._ns[0], self._ns[0] + self._ns[1])
            ring_sums.add_three(
                site, ys, self._ns, [ring_sums.Sums(sums, n, self._parts, at) for at in firsts], biases, count
            )
            return
        more = Epilogue(biases[0] if biases else ys[0], ys[0], ys[0] if residual is None else residual)
        site.launch(
            ring_sums.add_parts, (count, cdiv(n, _COLUMNS)), ys[0], sums, more, stride, maps.alpha, n, PARTS=self._parts,
            BIAS=bool(biases), ADD=residual is not None, C=_COLUMNS, early=early,
        )  # fmt: skip


class _Maps:
    """A launch of maps of one x, each by itself or together."""

    def __init__(self, site: Site, maps: Maps) -> None:
        self._site, self._maps = site, maps
        beside = len(maps.weights) == 3 and ring.as_one(maps.weights) is not None and len(maps.given) in (0, 3)
        if maps.gated or beside:
            self._parts = [_One(site, maps, maps.ys, maps.weights, maps.given)]
        else:
            each = zip(maps.ys, maps.weights, maps.biases, strict=True)
            self._parts = [_One(site, maps, [y], [w], () if b is None else (b,)) for y, w, b in each]
        self._k = maps.weights[0].k
        self._padded = cdiv(self._k, 256) * 256
        # A norm puts all rows in order at once.
        self._normed = maps.arrange is not None
        axis, rows = (maps.axis, 1) if self._normed else ("one", AT_ONCE)
        self._room = site.scratch(axis, rows * self._padded, torch.float16)

    def __call__(self, batch: Batch) -> None:
        site, maps, count = self._site, self._maps, batch.count(self._maps.axis)
        if maps.arrange is not None and count:
            maps.arrange(self._room, batch, 0)
        for first, rows in pieces(count):
            arranged = self._room.tensor
            if self._normed:
                arranged = arranged[first * self._padded :]
            else:
                site.launch(
                    ring_x.arrange, (rows, cdiv(self._padded, _COLUMNS)), arranged, maps.x.tensor[first * self._k :],
                    K=self._k, KP=self._padded, C=_COLUMNS, early=starts_early(site),
                )  # fmt: skip
            for part in self._parts:
                part(arranged, first, rows)
