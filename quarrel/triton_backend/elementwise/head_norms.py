"""RMS norms of up to three values that stand beside each other, queries, keys and values of one head_dim, in one launch.

A program takes R heads of one of them, as in `norm.py`; so a row has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl

from quarrel.ops.norm import NormSpec
from quarrel.ops.program import Node
from quarrel.triton_backend.elementwise.norm import shape_of
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, starts_early

MOST, WIDEST = 3, 1024


@triton.jit
def _norm_tile(y, x, gain, tile, runs, K, eps, R: tl.constexpr, C: tl.constexpr):
    run = (tile * R + tl.arange(0, R)).to(tl.int64)[:, None]
    column = tl.arange(0, C)[None, :]
    ok = (run < runs) & (column < K)
    value = tl.load(x + run * K + column, mask=ok, other=0.0).to(tl.float32)
    by = 1.0 / tl.sqrt(tl.sum(value * value, 1)[:, None] / K + eps)
    value = value * by * tl.load(gain + column, mask=column < K, other=0.0)
    tl.store(y + run * K + column, value.to(y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def head_norms(
    ys, xs, gains, rows, K, eps, GROUPS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Of each argument a tuple of three: act `[rows, GROUPS * K]`, gains float32 `[K]`. The first one's programs come
    first."""
    # Parts of a constant are constants by annotation only (Triton 3.6).
    G0: tl.constexpr = GROUPS[0]
    G1: tl.constexpr = GROUPS[1]
    G2: tl.constexpr = GROUPS[2]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    second = tl.cdiv(rows * G0, R)
    third = second + tl.cdiv(rows * G1, R)
    if tile < second:
        _norm_tile(ys[0], xs[0], gains[0], tile, rows * G0, K, eps, R, C)
    elif tile < third:
        _norm_tile(ys[1], xs[1], gains[1], tile - second, rows * G1, K, eps, R, C)
    else:
        _norm_tile(ys[2], xs[2], gains[2], tile - third, rows * G2, K, eps, R, C)


def takes(node: Node) -> bool:
    """Whether this NORM may be one of them."""
    spec: NormSpec = node.spec
    return spec.kind == "rms" and spec.k <= WIDEST and spec.out == "act"


@dataclass(frozen=True)
class HeadNorms:
    """NORMs of two or three values, of one width and one epsilon."""

    nodes: Sequence[Node]

    def build(self, site: Site) -> Launch:
        """In one launch, of any number of rows."""
        spec: NormSpec = self.nodes[0].spec
        several = [*self.nodes, self.nodes[-1]][:MOST]
        groups = (*(node.spec.groups for node in self.nodes), 0)[:MOST]  # a third that is missing has no rows
        xs = [site.slot(node.inputs[0]) for node in several]  # type: ignore[arg-type]
        ys = [site.slot(node.outputs[0]) for node in several]
        gains = tuple(site.vector(node.inputs[1]) for node in several)  # type: ignore[arg-type]
        axis, _ = dims(self.nodes[0].outputs[0])
        columns, runs_each = shape_of(spec.k)

        def run(batch: Batch) -> None:
            rows = batch.count(axis)
            site.launch(
                head_norms, (sum(cdiv(rows * n, runs_each) for n in groups),), tuple(y.tensor for y in ys),
                tuple(x.tensor for x in xs), gains, rows, spec.k, spec.eps, GROUPS=groups, R=runs_each, C=columns, warps=4,
                early=starts_early(site),
            )  # fmt: skip

        return run
