"""Linear maps of many rows in E4M3 (`compute="fp8"`): x is rounded once for all maps that read it, a weight once and kept.

The weights of a launch lie one behind the other, so that three maps, or gate and up with their activation, are one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from quarrel.triton_backend.formats import e4m3
from quarrel.triton_backend.linear.dequant_matmul import decoder, plain
from quarrel.triton_backend.linear.e4m3_kernels import e4m3_products
from quarrel.triton_backend.linear.maps import UNLIMITED, Maps, Serves
from quarrel.triton_backend.linear.matvec_tiles import multiprocessors
from quarrel.triton_backend.runtime.arrays import DTYPES, E4M3, Packed, Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv
from quarrel.triton_backend.runtime.site import Batch, Site, starts_early

LEAST = 129
"""Fewer rows are bound by the bytes of a weight, and read it in its own format."""
PIECE = 32 << 20
"""Values that are decoded at once before they are rounded."""


@dataclass(frozen=True)
class Tile:
    """`tokens` by `rows` of the weights, `columns` to a step."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


# Of an H200, in us for q, k and v, o, gate and up, down of Mistral-7B: 4096 rows WIDE 142, 128, 655, 366 (three stages) and
# NARROW 153, 139, 751, 383; 512 rows 25, 28, 99, 76 and 28, 19, 102, 50. The library, which leaves sums, activation and
# rounding to others: 139, 94, 641, 328; 24, 15, 86, 41.
WIDE, NARROW, SMALL = Tile(128, 256, 128, 8, 4), Tile(128, 128, 128, 8, 4), Tile(16, 32, 32, 4, 2)
# What a tile of NARROW costs, where one of WIDE costs 2.
_NARROW_COST = 1.15


def declines(site: Site, maps: Maps) -> str | None:
    """Why these kernels do not compute the maps, or None."""
    if maps.axis != "T":
        return "what is asked of rows of results, as the output layer, stays exact"
    if len({w.k for w in maps.weights}) > 1 or 0 < len(maps.given) < len(maps.weights):
        return "needs weights of one width, all or none with a bias"
    return e4m3.declines(site, maps.weights)


def build(site: Site, maps: Maps) -> Serves:
    return Serves(Products(site, maps), LEAST, UNLIMITED)


def rounded(site: Site, weights: Sequence[Packed], scratch: Slot, kept: E4M3, together: bool) -> None:
    """Fills `kept` with the rows of the weights, one behind the other, or in turn if `together`."""
    step = len(weights) if together else 1
    for i, w in enumerate(weights):
        base = i if together else sum(v.n for v in weights[:i])
        whole, decode = plain(w, site.compute), decoder(site, w)
        at_once = max(1, PIECE // w.k)
        for begin in range(0, w.n, at_once):
            count = min(at_once, w.n - begin)
            if whole is None:
                decode(begin, begin + count, scratch.tensor)
            first = base + begin * step
            values = scratch.tensor if whole is None else whole[begin : begin + count]
            e4m3.put(site, kept.codes[first:], kept.scale[first:], values, count, w.k, step)


def room(site: Site, weights: Sequence[Packed]) -> Slot:
    """Scratch that these weights are decoded into, a piece at a time."""
    sizes = [1 if plain(w, site.compute) is not None else max(1, min(w.n, PIECE // w.k)) * w.k for w in weights]
    return site.scratch("one", max(sizes), DTYPES[site.compute])


def tile_for(tokens: int, rows: Sequence[int], programs: int) -> Tile:
    """The tile that takes least time for so many rows of x and of the weights on a device of so many multiprocessors."""
    if INTERPRETED:
        return SMALL
    if any(n % WIDE.rows for n in rows) and len(rows) > 1:
        return NARROW
    wide, narrow = (cdiv(cdiv(tokens, t.tokens) * sum(cdiv(n, t.rows) for n in rows), programs) for t in (WIDE, NARROW))
    return WIDE if 2 * wide <= _NARROW_COST * narrow else NARROW


class Products:
    """One map, gate and up, or several maps of one x."""

    def __init__(self, site: Site, maps: Maps) -> None:
        kept = site.e4m3(maps.weights)
        assert kept is not None
        self._site, self._maps, self._kept = site, maps, kept
        self._k, ns = maps.weights[0].k, [w.n for w in maps.weights]
        self._decoded = room(site, maps.weights)
        self._codes = site.scratch("T", self._k, torch.float8_e4m3fn)
        self._scale = site.scratch("T", 1)
        self._programs = multiprocessors(kept.codes.device)
        together = (maps.gated or len(ns) == 1) or (len(ns) == 3 and not any(n % NARROW.rows for n in ns))
        self._parts = [list(range(len(ns)))] if together else [[i] for i in range(len(ns))]
        self._bias = None
        if maps.given:
            self._bias = torch.stack(maps.given, 1).view(-1) if maps.gated else torch.cat([b.view(-1) for b in maps.given])

    def __call__(self, batch: Batch) -> None:
        count, maps, site = batch.T, self._maps, self._site
        if count == 0:
            return
        self._kept.fill(lambda: rounded(site, maps.weights, self._decoded, self._kept, maps.gated))
        e4m3.put(site, self._codes.tensor, self._scale.tensor, maps.x.tensor, count, self._k)
        for part in self._parts:
            self._multiply(count, part)

    def _multiply(self, count: int, part: Sequence[int]) -> None:
        maps, k = self._maps, self._k
        ns = [maps.weights[i].n for i in part]
        if maps.gated:
            ns = [sum(ns)]
        begin, rows = sum(w.n for w in maps.weights[: part[0]]), sum(ns)
        tile = tile_for(count, ns, self._programs)
        x = TensorDescriptor.from_tensor(self._codes.tensor[: count * k].view(count, k), [tile.tokens, tile.columns])
        w = TensorDescriptor.from_tensor(self._kept.codes[begin : begin + rows], [tile.rows, tile.columns])
        ys = [maps.ys[0 if maps.gated else i].tensor for i in part]
        self._site.launch(
            e4m3_products, (self._programs,), ys[0], ys[len(ys) // 2], ys[-1], x, w, self._scale.tensor,
            self._kept.scale[begin:], ys[0] if self._bias is None else self._bias[begin:],
            ys[0] if maps.residual is None else maps.residual.tensor, count, ns[0], ns[len(ns) // 2], ns[-1],
            cdiv(k, tile.columns), maps.alpha, GATED=maps.gated, KIND=maps.activation, BIAS=self._bias is not None,
            ADD=maps.residual is not None, MAPS=len(ns), BT=tile.tokens, BN=tile.rows, BK=tile.columns,
            early=starts_early(self._site), warps=tile.warps,
            # A fourth stage does not fit beside float32 results of WIDE.
            stages=3 if tile == WIDE and ys[0].element_size() == 4 else tile.stages,
        )  # fmt: skip
