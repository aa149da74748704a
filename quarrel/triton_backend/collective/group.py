"""What the members of a group do together: the group adds buffers in place, on the current stream, graphs included.

A part of a result is read by nobody but the sum, so its own buffer is where the members' parts are added; the residual
follows in a kernel of its own. PLACE writes whole rows: a program fills BLOCK values, zeros beside the member's columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quarrel.ops.collective import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_ADD, BROADCAST, PLACE, Group
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation
from quarrel.triton_backend.elementwise.activation import BLOCK, add_flat
from quarrel.triton_backend.runtime.launch import cdiv
from quarrel.triton_backend.runtime.site import Batch, Launch, Site, dims, starts_early


@triton.jit
def place_flat(y, x, size, START, N, TOTAL, BLOCK: tl.constexpr):
    """y `[T, TOTAL]` float32, flat; x `[T, N]`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // TOTAL
    column = at % TOTAL - START
    inside = (at < size) & (column >= 0) & (column < N)
    value = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, value, mask=at < size)


def build_all_reduce(site: Site, node: Node) -> Launch:
    """ALL_REDUCE: x `[T, n]` float32."""
    group = site.group
    source, target = site.slot(node.inputs[0]), site.slot(node.outputs[0])  # type: ignore[arg-type]
    axis, width = dims(node.outputs[0])

    def run(batch: Batch) -> None:
        size = batch.count(axis) * width
        target.tensor[:size].copy_(source.tensor[:size])
        _sum(group, target.tensor[:size])

    return run


def build_all_reduce_add(site: Site, node: Node) -> Launch:
    """ALL_REDUCE_ADD: residual and x `[T, n]` float32; what x holds is lost."""
    group, scale = site.group, node.spec.scale
    residual, part, target = (site.slot(v) for v in (*node.inputs, node.outputs[0]))  # type: ignore[arg-type]
    axis, width = dims(node.outputs[0])

    def run(batch: Batch) -> None:
        size = batch.count(axis) * width
        if group is not None and size:
            rows = (target.tensor[:size], residual.tensor[:size], part.tensor[:size])
            if group.all_reduce_add(*rows, scale):
                return
            group.all_reduce(rows[2])
        grid = (cdiv(size, BLOCK),)
        site.launch(
            add_flat, grid, target.tensor, residual.tensor, part.tensor, size, scale, BLOCK=BLOCK, early=starts_early(site)
        )

    return run


def _place(site: Site, node: Node, group: Group | None) -> Launch:
    s = node.spec
    source, target = site.slot(node.inputs[0]), site.slot(node.outputs[0])  # type: ignore[arg-type]
    axis, width = dims(node.outputs[0])

    def run(batch: Batch) -> None:
        size = batch.count(axis) * width
        grid = (cdiv(size, BLOCK),)
        site.launch(place_flat, grid, target.tensor, source.tensor, size, s.start, s.n, s.total, BLOCK=BLOCK)
        _sum(group, target.tensor[:size])

    return run


def build_place(site: Site, node: Node) -> Launch:
    """PLACE: x `[T, n]`."""
    return _place(site, node, None)


def build_all_gather(site: Site, node: Node) -> Launch:
    """ALL_GATHER: x `[T, n]`."""
    return _place(site, node, site.group)


def build_broadcast(site: Site, node: Node) -> Launch:
    """BROADCAST: x `[T, n]` float32 at its source."""
    s, group = node.spec, site.group
    source = site.slot(node.inputs[0]) if s.mine else None  # type: ignore[arg-type]
    target = site.slot(node.outputs[0])
    axis, width = dims(node.outputs[0])

    def run(batch: Batch) -> None:
        rows = target.tensor[: batch.count(axis) * width]
        if source is None:
            rows.zero_()
        else:
            rows.copy_(source.tensor[: rows.numel()])
        if group is not None and rows.numel():
            group.broadcast(rows, s.source)

    return run


def _sum(group: Group | None, rows: object) -> None:
    if group is not None and len(rows):  # type: ignore[arg-type]
        group.all_reduce(rows)


IMPLEMENTATIONS = (
    Implementation(ALL_REDUCE_ADD, "the group's, in place", build_all_reduce_add),
    Implementation(ALL_GATHER, "place, then the group's", build_all_gather),
    Implementation(ALL_REDUCE, "the group's", build_all_reduce),
    Implementation(PLACE, "flat", build_place),
    Implementation(BROADCAST, "the group's", build_broadcast),
)
