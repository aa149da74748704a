"""What encoders need: attention in both directions over the sequence itself, and a row added to all.

Attention is the kernel of `flash.py` with keys where the queries lie; the row is one elementwise operation of MLX.
"""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.flash import Flash, refuses
from quarrel.mlx_backend.runtime import Launch, Live, Site
from quarrel.ops.encode import ADD_ROW, ENCODE, EncodeSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation


def build_encode(site: Site, node: Node) -> Launch:
    """ENCODE: q, k and v `[T, heads * head_dim]`, query_start `[S + 1]`."""
    spec: EncodeSpec = node.spec
    flash = Flash(spec.n_heads, spec.n_heads, spec.head_dim, spec.scale, site.act, paged=False)

    def run(live: Live, q: mx.array, k: mx.array, v: mx.array, query_start: mx.array) -> list[mx.array]:
        return [flash(q, k, v, query_start, live.longest)]

    return run


def build_add_row(site: Site, node: Node) -> Launch:
    """ADD_ROW: x `[T, n]` float32, row `[n]`."""
    row = site.vector(node.inputs[1])  # type: ignore[arg-type]

    def run(live: Live, x: mx.array) -> list[mx.array]:
        return [x + row]

    return run


def _accepts(spec: EncodeSpec) -> str | None:
    return refuses(spec.n_heads, spec.n_heads, spec.head_dim)


IMPLEMENTATIONS = (
    Implementation(ENCODE, "SIMD-group matrices", build_encode, _accepts),
    Implementation(ADD_ROW, "MLX's addition", build_add_row),
)
