"""Attention of encoders, in both directions over the sequence itself: `flash.py` with keys where the queries lie."""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.attention.flash import Flash, refuses
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site
from quarrel.ops.encode import ENCODE, EncodeSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation


def build_encode(site: Site, node: Node) -> Launch:
    """ENCODE: q `[T, heads * head_dim]`, k and v `[T, key_heads * head_dim]`, query_start `[S + 1]`."""
    spec: EncodeSpec = node.spec
    window = spec.reach + 1 if spec.reach else 0
    flash = Flash(spec.n_heads, spec.key_heads, spec.head_dim, spec.scale, site.act, paged=False, window=window)

    def run(batch: Batch, q: mx.array, k: mx.array, v: mx.array, query_start: mx.array) -> list[mx.array]:
        return [flash(q, k, v, query_start, batch.max_new)]

    return run


def _accepts(spec: EncodeSpec) -> str | None:
    return refuses(spec.n_heads, spec.key_heads, spec.head_dim)


IMPLEMENTATIONS = (Implementation(ENCODE, "SIMD-group matrices", build_encode, _accepts),)
