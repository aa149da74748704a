"""A composite op by its parts, for steps of several rows: a norm into scratch, then its maps together."""

from __future__ import annotations

from itertools import groupby

from quarrel.ops.activation import GATED
from quarrel.ops.linear import LINEAR
from quarrel.ops.null import expand
from quarrel.ops.program import Node
from quarrel.triton_backend.elementwise import norm
from quarrel.triton_backend.linear.maps import Maps
from quarrel.triton_backend.runtime.arrays import DTYPES
from quarrel.triton_backend.runtime.site import Site, dims, inside


def maps_of(site: Site, node: Node) -> Maps:
    """The maps of NORM_LINEAR or NORM_GATE_UP, and the norm before them."""
    (normed, *parts), _ = expand(node, 1 << 30)
    (middle,) = normed.outputs
    axis, width = dims(middle)
    x = site.scratch(axis, width, DTYPES[site.compute])
    inner = inside(site, {middle.id: x})
    linears = [part for part in parts if part.op.name == LINEAR.name]
    if parts[-1].op.name != GATED.name:
        for _, alike in groupby((part.inputs[1] for part in linears), key=lambda ref: (ref.type, ref.k)):  # type: ignore[union-attr]
            site.beside(list(alike))  # type: ignore[arg-type]
    return Maps(
        x,
        [site.slot(v) for v in node.outputs],
        [site.weight(part.inputs[1]) for part in linears],  # type: ignore[arg-type]
        [site.vector(part.inputs[2]) if part.spec.bias else None for part in linears],  # type: ignore[arg-type]
        axis,
        activation=parts[-1].spec.activation if parts[-1].op.name == GATED.name else "none",
        norm=norm.build_norm(inner, normed),
        arrange=norm.arranger(inner, normed),
    )
