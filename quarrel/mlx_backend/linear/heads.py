"""HEAD_LINEAR: a matrix of each head's own (`ops/heads.py`), by the kernels of experts: a pair of a token and a head has
chosen that head's matrix, for good. What is passed through is put in front by MLX."""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.experts.experts import NO_KIND, Experts
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site
from quarrel.ops.heads import HEAD_LINEAR, HeadLinearSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation


def build_head_linear(site: Site, node: Node) -> Launch:
    """x `[T, heads * (k + rest)]`; y `[T, heads * (rest + n)]`."""
    spec: HeadLinearSpec = node.spec
    stack = site.weight(node.inputs[1])  # type: ignore[arg-type]
    heads = Experts([stack], [], spec.n_heads, 1, spec.n, NO_KIND, site.act)

    def product(x: mx.array, single: bool) -> list[mx.array]:
        pairs = x.reshape(-1, spec.k + spec.rest)
        ids = mx.tile(mx.arange(spec.n_heads, dtype=mx.int32), x.shape[0]).reshape(-1, 1)
        mapped = pairs[:, : spec.k]
        if single:
            y = heads.down(mapped, ids, mx.ones(ids.shape, mx.float32))
        else:
            y = heads.tiles(mapped, ids, 1, mx.float32).reshape(-1, spec.n)
        both = mx.concatenate([pairs[:, spec.k :].astype(site.act), y.astype(site.act)], 1)
        return [both.reshape(x.shape[0], spec.out_width)]

    def run(batch: Batch, x: mx.array) -> list[mx.array]:
        return batch.tokens.dispatch(lambda x: product(x, True), lambda x: product(x, False), x)

    return run


IMPLEMENTATIONS = (Implementation(HEAD_LINEAR, "a pair at a time, or tiles of a head's", build_head_linear),)
