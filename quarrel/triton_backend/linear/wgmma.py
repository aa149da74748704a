"""Linear maps of 33 to 128 rows on devices of capability 9 (`warpgroup.py`), where a weight is large enough to gain by it.

Tiles follow from the weight's shape; the number of rows only says whether products have 64 or 128 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quarrel.triton_backend.elementwise import wgmma_x
from quarrel.triton_backend.formats.table import FRAGMENTS
from quarrel.triton_backend.linear.maps import Maps, Serves
from quarrel.triton_backend.linear.matmul import Epilogue, SplitK
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
"""Values of a launch's weights from which it gains: 4096 x 4096 took 22.8 us, and putting rows in order 3, where the tiles
of `matmul.py` took 25.5; query, key and value of 6144 x 4096 27.8 and 38.4 (H200, 128 rows)."""


@dataclass(frozen=True)
class Tile:
    """`rows` of a weight a program (16 a warp), `parts` of K."""

    rows: int
    parts: int

    @property
    def warps(self) -> int:
        return self.rows // 16


def tile_for(ns: Sequence[int], k: int, width: int, gated: bool = False, wide: bool = False) -> Tile:
    """By the weights' shape and a width of rows; `wide` for codes of 8 bits.

    With 128 columns two programs of 64 rows to a multiprocessor beat one of 128: gate and up of 14336 x 4096 took 56.8 us
    (75.9), 4096 x 14336 in four parts 59.3 (60.0; in two 78.1), 6144 x 4096 in two 29.7 (33.0). With 64 columns more of
    them find room on one than on another, so 128 rows are better if they fill the device once: 55.0 us (62.1), 41.6 (48.7);
    not where 96 programs leave a quarter of it idle, 38.8 (22.7), nor for 32000 x 4096, whose 250 take two turns, 87.2
    (77.4); H200, Triton 3.6. Codes of 8 bits take so much memory that gate and up have no second program with 128 columns,
    and so long to come that with 64 two programs are the better.
    """
    steps = k // wgmma_x.STEP
    tiles = sum(cdiv(n, 128) for n in ns)
    whole = gated and wide if width == MOST else not wide
    for parts in (1, 2, 4, 8) if whole else ():
        if tiles * parts in _WHOLE and steps >= 4 * parts:
            return Tile(128, parts)
    tiles, parts = sum(cdiv(n, 64) for n in ns), 1
    while tiles * parts < _PROGRAMS and parts < _MOST_PARTS and steps >= 8 * parts:
        parts *= 2
    return Tile(64, parts)


def declines(site: Site, maps: Maps) -> str | None:
    """Takes float16 arithmetic on weights that are large enough to gain, on devices of capability 9."""
    for w in maps.weights:
        if w.format not in FRAGMENTS or w.k % wgmma_x.STEP:
            return f"needs {', '.join(FRAGMENTS)} in rows of whole {wgmma_x.STEP} columns, got {w.format} of {w.k}"
    values = sum(w.n * w.k for w in maps.weights)
    if values <= _SMALL:
        return f"needs more than {_SMALL} weights, got {values}"
    if wgmma_kernels is None or INTERPRETED or site.generation != 9 or site.compute != "float16" or site.deterministic:
        return "needs float16 arithmetic, compute capability 9, and steps that need not be deterministic"
    return maps.together()


def width_of(count: int) -> int:
    """Columns of a product for so many rows."""
    return next(width for width in wgmma_x.WIDTHS if count <= width)


def _tiles(
    site: Site, ns: Sequence[int], k: int, gated: bool = False, wide: bool = False
) -> tuple[dict[int, Tile], Slot, Slot]:
    """By width of rows; scratch for the sums of parts, and a count for every tile."""
    by_width = {width: tile_for(ns, k, width, gated, wide) for width in wgmma_x.WIDTHS}
    size, most = 1, 1
    for width, tile in by_width.items():
        tiles = sum(cdiv(n, tile.rows) for n in ns)
        most = max(most, tiles)
        if tile.parts > 1:
            size = max(size, (1 + gated) * tile.parts * tiles * tile.rows * width)
    return by_width, site.scratch("one", size), site.zeros("one", most)


def build(site: Site, maps: Maps) -> Serves:
    """For LEAST to MOST rows; x is put in the kernel's order first, by the norm if there is one that can."""
    a, b = maps.weights[0], maps.weights[-1]
    ns, k, gated, biases = tuple(w.n for w in maps.weights), a.k, maps.gated, maps.given
    planes, formats = tuple(w.planes for w in maps.weights), tuple(w.format for w in maps.weights)
    arranged = site.scratch("one", MOST * k, torch.float16)
    by_width, part, arrived = _tiles(site, ns[:1] if gated else ns, k, gated, any(f == "Q8_0" for f in formats))

    def prepare(batch: Batch, width: int) -> None:
        if maps.arrange is not None:
            maps.arrange(arranged, batch, width)
        else:
            grid, count = (k // wgmma_x.STEP, width // 16), batch.count(maps.axis)
            early = starts_early(site)
            site.launch(wgmma_x.arrange, grid, arranged.tensor, maps.x.tensor, count, K=k, BT=width, early=early)

    def one(batch: Batch) -> None:
        y, count = maps.ys[0].tensor, batch.count(maps.axis)
        width = width_of(count)
        tile = by_width[width]
        prepare(batch, width)
        more = Epilogue(
            *(biases[i] if biases else y for i in (0, -1)), y if maps.residual is None else maps.residual.tensor
        )
        site.launch(
            wgmma_kernels.warpgroup_one, (cdiv(a.n, tile.rows), tile.parts), y, arranged.tensor, a.planes, b.planes, more,
            SplitK(part.tensor, arrived.tensor), count, maps.alpha, a.n, K=k, FORMAT=a.format, BIAS=bool(biases),
            ADD=maps.residual is not None, GATED=gated, KIND=maps.activation, PARTS=tile.parts, BM=tile.rows, BT=width,
            warps=tile.warps, stages=1, early=starts_early(site),
        )  # fmt: skip

    def three(batch: Batch) -> None:
        count, outs = batch.count(maps.axis), tuple(y.tensor for y in maps.ys)
        width = width_of(count)
        tile = by_width[width]
        prepare(batch, width)
        site.launch(
            wgmma_kernels.warpgroup_three, (sum(cdiv(n, tile.rows) for n in ns), tile.parts), outs, arranged.tensor,
            planes, biases or outs, SplitK(part.tensor, arrived.tensor), count, ns, K=k, FORMATS=formats,
            BIAS=bool(biases), PARTS=tile.parts, BM=tile.rows, BT=width, warps=tile.warps, stages=1,
            early=starts_early(site),
        )  # fmt: skip

    return Serves(three if len(planes) == 3 else one, LEAST, MOST, maps.arrange is not None)
