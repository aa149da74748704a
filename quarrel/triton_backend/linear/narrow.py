"""Linear maps of few outputs with float32 weights: the gate of a shared expert, a router of streams.

A tile of `tiles.py` would be one program for all outputs, some 20 us on an H200 for a few rows; here one has an output or
two and a few rows, as where routers' logits are made (`experts/route.py: gate_rows`). Weights are not rounded.
"""

from __future__ import annotations

from quarrel.triton_backend.experts.route import ROUTED, gate_rows
from quarrel.triton_backend.linear.maps import UNLIMITED, Maps, Serves
from quarrel.triton_backend.runtime.launch import cdiv, power_of_two
from quarrel.triton_backend.runtime.site import Batch, Site, starts_early

MOST, NARROWEST = 512, 4
"""Outputs; up to the latter for any number of rows, as a wider tile would have next to no outputs."""
_ROWS, _COLUMNS, _WARPS = 4, 4096, 8


def declines(site: Site, maps: Maps) -> str | None:
    """Takes one map with float32 weights in 16-bit arithmetic; a deterministic step those that it computes for all rows."""
    if len(maps.weights) > 1 or maps.residual is not None or maps.norm is not None:
        return f"needs one map that adds to nothing, got {len(maps.weights)} maps"
    (weight,) = maps.weights
    if site.compute == "float32" or weight.format != "F32":
        return f"needs float32 weights in 16-bit arithmetic, got {weight.format} in {site.compute}"
    most = NARROWEST if site.deterministic else MOST
    return None if weight.n <= most else f"needs at most {most} outputs, got {weight.n}"


def build(site: Site, maps: Maps) -> Serves:
    (weight,), (bias,), y, x = maps.weights, maps.biases, maps.ys[0], maps.x

    def run(batch: Batch) -> None:
        rows = batch.count(maps.axis)
        site.launch(
            gate_rows, (weight.n, cdiv(rows, _ROWS)), y.tensor, x.tensor, weight.planes.codes,
            y.tensor if bias is None else bias, rows, EXPERTS=weight.n, K=weight.k, GATE_BIAS=bias is not None, R=1,
            T=_ROWS, W=min(_COLUMNS, power_of_two(weight.k)), warps=_WARPS, early=starts_early(site),
        )  # fmt: skip

    return Serves(run, 0, UNLIMITED if weight.n <= NARROWEST else ROUTED)
