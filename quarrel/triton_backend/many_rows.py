"""Linear maps of 33 to 128 rows on devices of capability 9 (`warpgroup.py`), where a weight is large enough to gain by it.

Tiles follow from the weight's shape; the number of rows only says whether products have 64 or 128 columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quarrel.triton_backend import warpgroup_x
from quarrel.triton_backend.pack import Packed
from quarrel.triton_backend.rows import Few, Fill
from quarrel.triton_backend.runtime import INTERPRETED, Live, Site, Slot, cdiv, starts_early

try:  # Gluon is no stable interface: without the names of Triton 3.6 to 3.9 others run
    from quarrel.triton_backend import warpgroup
except (ImportError, AttributeError):  # pragma: no cover
    warpgroup = None  # type: ignore[assignment]

LEAST, MOST = 33, 128
TAKEN = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0")
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
    steps = k // warpgroup_x.STEP
    tiles = sum(cdiv(n, 128) for n in ns)
    whole = gated and wide if width == MOST else not wide
    for parts in (1, 2, 4, 8) if whole else ():
        if tiles * parts in _WHOLE and steps >= 4 * parts:
            return Tile(128, parts)
    tiles, parts = sum(cdiv(n, 64) for n in ns), 1
    while tiles * parts < _PROGRAMS and parts < _MOST_PARTS and steps >= 8 * parts:
        parts *= 2
    return Tile(64, parts)


def takes(site: Site, weights: Sequence[Packed]) -> bool:
    """Whether these kernels read the weights and gain by it."""
    if warpgroup is None or INTERPRETED or site.generation != 9 or site.compute != "float16" or site.deterministic:
        return False
    read = all(w.format in TAKEN and w.k % warpgroup_x.STEP == 0 for w in weights)
    return read and sum(w.n * w.k for w in weights) > _SMALL


def width_of(count: int) -> int:
    """Columns of a product for so many rows."""
    return next(width for width in warpgroup_x.WIDTHS if count <= width)


def linear(
    site: Site, x: Slot, y: Slot, weight: Packed, bias: torch.Tensor | None, residual: Slot | None, alpha: float, axis: str
) -> Few | None:
    """y = W x + bias, or residual + alpha * that, for LEAST to MOST rows; None if these kernels do not take it."""
    return _one(site, x, y, (weight,), () if bias is None else (bias,), residual, alpha, axis, "none", None)


def gate_up(
    site: Site, x: Slot, y: Slot, gate: Packed, up: Packed, biases: Sequence[torch.Tensor], activation: str, axis: str,
    fill: Fill | None,
) -> Few | None:  # fmt: skip
    """y = activation(gate x) * up x; both matrices have one format and shape, biases are two or none."""
    return _one(site, x, y, (gate, up), biases, None, 1.0, axis, activation, fill)


def _arranged(site: Site, x: Slot, k: int, axis: str, fill: Fill | None) -> Callable[[Live, int], torch.Tensor]:
    """What puts x where the kernels read it, for a width of rows."""
    to = site.scratch("one", MOST * k, torch.float16)

    def prepare(live: Live, width: int) -> torch.Tensor:
        if fill is not None:
            fill(to, live, width)
        else:
            grid = (k // warpgroup_x.STEP, width // 16)
            early = starts_early(site)
            site.launch(warpgroup_x.arrange, grid, to.tensor, x.tensor, live.count(axis), K=k, BT=width, early=early)
        return to.tensor

    return prepare


def _tiles(
    site: Site, ns: Sequence[int], k: int, gated: bool = False, wide: bool = False
) -> tuple[dict[int, Tile], Slot, Slot]:
    """By width of rows; scratch for the sums of parts, and a count for every tile."""
    by_width = {width: tile_for(ns, k, width, gated, wide) for width in warpgroup_x.WIDTHS}
    size, most = 1, 1
    for width, tile in by_width.items():
        tiles = sum(cdiv(n, tile.rows) for n in ns)
        most = max(most, tiles)
        if tile.parts > 1:
            size = max(size, (1 + gated) * tile.parts * tiles * tile.rows * width)
    return by_width, site.scratch("one", size), site.zeros("one", most)


def _one(
    site: Site, x: Slot, y: Slot, weights: Sequence[Packed], biases: Sequence[torch.Tensor], residual: Slot | None,
    alpha: float, axis: str, kind: str, fill: Fill | None,
) -> Few | None:  # fmt: skip
    if not takes(site, weights):
        return None
    a, b, gated = weights[0], weights[-1], len(weights) == 2
    prepare = _arranged(site, x, a.k, axis, fill)
    by_width, part, arrived = _tiles(site, [a.n], a.k, gated, a.format == "Q8_0")

    def run(live: Live) -> None:
        count, none = live.count(axis), y.tensor
        width = width_of(count)
        tile = by_width[width]
        site.launch(
            warpgroup.warpgroup_one, (cdiv(a.n, tile.rows), tile.parts), y.tensor, prepare(live, width), *a.planes,
            *b.planes, biases[0] if biases else none, biases[-1] if biases else none,
            none if residual is None else residual.tensor, part.tensor, arrived.tensor, count, alpha, a.n, K=a.k,
            FORMAT=a.format, BIAS=bool(biases), ADD=residual is not None, GATED=gated, KIND=kind, PARTS=tile.parts,
            BM=tile.rows, BT=width, warps=tile.warps, stages=1, early=starts_early(site),
        )  # fmt: skip

    return Few(run, MOST, fill is not None, LEAST)


def linears(
    site: Site, x: Slot, ys: Sequence[Slot], weights: Sequence[Packed], biases: Sequence[torch.Tensor], axis: str,
    fill: Fill | None,
) -> Few | None:  # fmt: skip
    """Three maps of one x in one launch; their formats may differ. Biases are three or none."""
    if not takes(site, weights):
        return None
    ns, k = [w.n for w in weights], weights[0].k
    planes = [p for w in weights for p in w.planes]
    prepare = _arranged(site, x, k, axis, fill)
    by_width, part, arrived = _tiles(site, ns, k, wide=any(w.format == "Q8_0" for w in weights))

    def run(live: Live) -> None:
        count, outs = live.count(axis), [y.tensor for y in ys]
        width = width_of(count)
        tile = by_width[width]
        site.launch(
            warpgroup.warpgroup_three, (sum(cdiv(n, tile.rows) for n in ns), tile.parts), *outs, prepare(live, width),
            *planes, *(biases or outs), part.tensor, arrived.tensor, count, *ns, K=k, FORMAT0=weights[0].format,
            FORMAT1=weights[1].format, FORMAT2=weights[2].format, BIAS=bool(biases), PARTS=tile.parts, BM=tile.rows,
            BT=width, warps=tile.warps, stages=1, early=starts_early(site),
        )  # fmt: skip

    return Few(run, MOST, fill is not None, LEAST)
