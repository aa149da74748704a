"""The kernels of linear maps over packed weights, best first: what each takes, or why it declines.

A launch asks in this order which one serves its number of rows. A weight's way from file to launch is four stops:
`formats/weights.py` (its rows of the file), its format's file in `formats/` (its planes), this table, and the file of the
kernel, which calls `site.launch`. Entries follow from a map's shape, format and arithmetic and the device, never from what
else a step holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quarrel.triton_backend.formats.table import FLOATS
from quarrel.triton_backend.linear import (
    dequant_matmul,
    e4m3,
    invariant,
    matmul,
    matvec_kernels,
    mma,
    narrow,
    ring,
    tiles,
    wgmma,
)
from quarrel.triton_backend.linear.maps import UNLIMITED, Maps, Serves
from quarrel.triton_backend.runtime.kernel import Kernel, choose
from quarrel.triton_backend.runtime.site import Batch, Site


class ByRows:
    """A launch of maps by the kernels that take them."""

    def __init__(self, site: Site, maps: Maps, kernels: Sequence[Kernel[Maps, Serves]] | None = None) -> None:
        self._axis, self._norm = maps.axis, maps.norm
        taken, self.declined = choose(KERNELS if kernels is None else kernels, site, maps)
        self._names, self._serves = [name for name, _ in taken], [serves for _, serves in taken]

    def __call__(self, batch: Batch) -> None:
        count = batch.count(self._axis)
        serves = self.serving(count)
        if self._norm is not None and not serves.norms:
            self._norm(batch)
        serves.run(batch)

    def serving(self, rows: int) -> Serves:
        """Who computes so many rows."""
        return next(s for s in self._serves if s.least <= rows <= s.most)

    def describe(self) -> str:
        """Which kernels serve which numbers of rows: `matvec 1, mma 2 to 16, ...`."""
        parts, row = [], 1
        while row < UNLIMITED:
            at = next(i for i, s in enumerate(self._serves) if s.least <= row <= s.most)
            ahead = [s.least for s in self._serves[:at] if s.least > row]
            last = min([self._serves[at].most, *(least - 1 for least in ahead)])
            parts.append(
                f"{self._names[at]} "
                + (f"from {row}" if last >= UNLIMITED else f"{row}" if last == row else f"{row} to {last}")
            )
            row = last + 1
        return ", ".join(parts) + " rows"


def _declines_separate(site: Site, maps: Maps) -> str | None:
    """Takes maps that are too many for one launch, or of which some have a bias."""
    return "one launch computes them" if maps.together() is None else matmul.declines_weights(site, maps.weights)


def _build_separate(site: Site, maps: Maps) -> Serves:
    """Three at a time and one by one, each by whoever takes those: four maps of a gated delta net are two launches."""
    biased = [b is not None for b in maps.biases]
    alike = sorted(range(len(biased)), key=lambda i: (biased[i], maps.weights[i].format in FLOATS))
    parts: list[list[int]] = []
    while alike:
        count = 3 if len(alike) >= 3 and biased[alike[0]] == biased[alike[2]] else 1
        parts.append(alike[:count])
        alike = alike[count:]
    launches = [
        ByRows(site, replace(maps, ys=ys, weights=weights, biases=biases, norm=None, matvec=None), WITHOUT_COPIES)
        for ys, weights, biases in (
            [[of[i] for i in part] for of in (maps.ys, maps.weights, maps.biases)] for part in parts
        )
    ]

    def run(batch: Batch) -> None:
        count = batch.count(maps.axis)
        if maps.norm is not None and not all(launch.serving(count).norms for launch in launches):
            maps.norm(batch)
        for launch in launches:
            launch(batch)

    return Serves(run, 0, UNLIMITED, True) if site.deterministic else Serves(run, 2, matmul.MOST, True)


KERNELS: tuple[Kernel[Maps, Serves], ...] = (
    Kernel("matvec", matvec_kernels.declines, matvec_kernels.build),
    Kernel("e4m3", e4m3.declines, e4m3.build),
    Kernel("invariant ring", invariant.declines, invariant.build),
    Kernel("ring", ring.declines, ring.build),
    Kernel("mma", mma.declines, mma.build),
    Kernel("wgmma", wgmma.declines, wgmma.build),
    Kernel("separate launches", _declines_separate, _build_separate),
    Kernel("matmul", matmul.declines, matmul.build),
    Kernel("dequantize, then the library's matmul", dequant_matmul.declines, dequant_matmul.build),
    Kernel("float32 rows", narrow.declines, narrow.build),
    Kernel("exact tiles", tiles.declines, tiles.build),
)
WITHOUT_COPIES = tuple(kernel for kernel in KERNELS if kernel.build not in (e4m3.build, dequant_matmul.build))
"""For steps that are never long: these kernels keep no copy of a weight that is decoded for long ones."""
