"""Query, key and value of 33 to 128 rows on devices of capability 9, where the weights are large enough to gain by it.

Tiles follow from the weight's shape; the number of rows only says whether products have 64 or 128 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quarrel.triton_backend.elementwise import wgmma_x
from quarrel.triton_backend.formats.table import FRAGMENTS
from quarrel.triton_backend.linear.maps import Maps, Serves
from quarrel.triton_backend.linear.matmul import SplitK
from quarrel.triton_backend.runtime.arrays import Slot
from quarrel.triton_backend.runtime.launch import INTERPRETED, cdiv
from quarrel.triton_backend.runtime.site import Batch, Site, starts_early

try:  # Gluon is no stable interface: without the names of Triton 3.6 to 3.9 others run
    from quarrel.triton_backend.linear import wgmma_kernels
except (ImportError, AttributeError):  # pragma: no cover
    wgmma_kernels = None  # type: ignore[assignment]

LEAST, MOST = 33, 128
_PROGRAMS = 150
"""Programs of 64 rows that fill an H200: two to a multiprocessor."""
_WHOLE = range(100, 133)
"""Programs of 128 rows, one to a multiprocessor."""
_MOST_PARTS = 8
_SMALL = 4096 * 4096
"""Values of a launch's weights above which it gains: 6144 x 4096 took 27.8 us where the tiles of `matmul.py` took 38.4
(H200, 128 rows)."""


@dataclass(frozen=True)
class Tile:
    """`rows` of a weight a program (16 a warp), `parts` of K."""

    rows: int
    parts: int

    @property
    def warps(self) -> int:
        return self.rows // 16


def tile_for(ns: Sequence[int], k: int, width: int, wide: bool = False) -> Tile:
    """By the weights' shape and a width of rows; `wide` for codes of 8 bits.

    With 128 columns two programs of 64 rows to a multiprocessor beat one of 128: 6144 x 4096 in two parts 29.7 us (33.0).
    With 64 columns more of them find room on one than on another, so 128 rows are better if they fill the device once; not
    where 96 programs leave a quarter of it idle, 38.8 us (22.7); H200, Triton 3.6. Codes of 8 bits take so long to come
    that two programs are always the better.
    """
    steps = k // wgmma_x.STEP
    tiles = sum(cdiv(n, 128) for n in ns)
    for parts in (1, 2, 4, 8) if width < MOST and not wide else ():
        if tiles * parts in _WHOLE and steps >= 4 * parts:
            return Tile(128, parts)
    tiles, parts = sum(cdiv(n, 64) for n in ns), 1
    while tiles * parts < _PROGRAMS and parts < _MOST_PARTS and steps >= 8 * parts:
        parts *= 2
    return Tile(64, parts)


def declines(site: Site, maps: Maps) -> str | None:
    """Takes float16 arithmetic on three maps that are large enough to gain, on devices of capability 9."""
    if len(maps.weights) != 3 or len(maps.given) not in (0, 3):
        return f"needs three maps with biases or without, got {len(maps.weights)} maps"
    for w in maps.weights:
        if w.format not in FRAGMENTS or w.k % wgmma_x.STEP:
            return f"needs {', '.join(FRAGMENTS)} in rows of whole {wgmma_x.STEP} columns, got {w.format} of {w.k}"
    values = sum(w.n * w.k for w in maps.weights)
    if values <= _SMALL:
        return f"needs more than {_SMALL} weights, got {values}"
    if wgmma_kernels is None or INTERPRETED or site.generation != 9 or site.compute != "float16" or site.deterministic:
        return "needs float16 arithmetic, compute capability 9, and steps that need not be deterministic"
    return None


def width_of(count: int) -> int:
    """Columns of a product for so many rows."""
    return next(width for width in wgmma_x.WIDTHS if count <= width)


def _tiles(site: Site, ns: Sequence[int], k: int, wide: bool) -> tuple[dict[int, Tile], Slot, Slot]:
    """By width of rows; scratch for the sums of parts, and a count for every tile."""
    by_width = {width: tile_for(ns, k, width, wide) for width in wgmma_x.WIDTHS}
    size, most = 1, 1
    for width, tile in by_width.items():
        tiles = sum(cdiv(n, tile.rows) for n in ns)
        most = max(most, tiles)
        if tile.parts > 1:
            size = max(size, tile.parts * tiles * tile.rows * width)
    return by_width, site.scratch("one", size), site.zeros("one", most)


def build(site: Site, maps: Maps) -> Serves:
    """For LEAST to MOST rows; x is put in the kernel's order first, by the norm if there is one that can."""
    ns, k, biases = tuple(w.n for w in maps.weights), maps.weights[0].k, maps.given
    planes, formats = tuple(w.planes for w in maps.weights), tuple(w.format for w in maps.weights)
    arranged = site.scratch("one", MOST * k, torch.float16)
    by_width, part, arrived = _tiles(site, ns, k, any(f == "Q8_0" for f in formats))

    def three(batch: Batch) -> None:
        count, outs, early = batch.count(maps.axis), tuple(y.tensor for y in maps.ys), starts_early(site)
        width = width_of(count)
        tile = by_width[width]
        if maps.arrange is not None:
            maps.arrange(arranged, batch, width)
        else:
            grid = (k // wgmma_x.STEP, width // 16)
            site.launch(wgmma_x.arrange, grid, arranged.tensor, maps.x.tensor, count, K=k, BT=width, early=early)
        site.launch(
            wgmma_kernels.warpgroup_three, (sum(cdiv(n, tile.rows) for n in ns), tile.parts), outs, arranged.tensor,
            planes, biases or outs, SplitK(part.tensor, arrived.tensor), count, ns, K=k, FORMATS=formats,
            BIAS=bool(biases), PARTS=tile.parts, BM=tile.rows, BT=width, warps=tile.warps, stages=1, early=early,
        )  # fmt: skip

    return Serves(three, LEAST, MOST, maps.arrange is not None)
