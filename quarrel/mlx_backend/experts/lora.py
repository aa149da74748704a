"""CHOSEN_LINEAR: one of some small matrices for each row (`ops/lora.py`), by the kernels of experts: each row has chosen
one alone, for good. The sum with what it is added to is MLX's."""

from __future__ import annotations

import mlx.core as mx

from quarrel.mlx_backend.experts.experts import NO_KIND, Experts
from quarrel.mlx_backend.runtime.launch import Batch, Launch, Site
from quarrel.ops.lora import CHOSEN_LINEAR, ChosenLinearSpec
from quarrel.ops.program import Node
from quarrel.ops.registry import Implementation


def build_chosen(site: Site, node: Node) -> Launch:
    """x `[T, k]`, ids `[T]`, perhaps base `[T, n]` float32; y `[T, n]`."""
    spec: ChosenLinearSpec = node.spec
    stack = site.weight(node.inputs[2])  # type: ignore[arg-type]
    chosen = Experts([stack], [], spec.count, 1, spec.n, NO_KIND, site.act)
    out = site.dtype(spec.out)

    def decode(x: mx.array, ids: mx.array) -> list[mx.array]:
        return [chosen.down(x, ids, mx.ones(ids.shape, mx.float32))]

    def prefill(x: mx.array, ids: mx.array) -> list[mx.array]:
        return [chosen.tiles(x, ids, 1, mx.float32).reshape(-1, spec.n)]

    def run(batch: Batch, x: mx.array, ids: mx.array, *base: mx.array) -> list[mx.array]:
        (y,) = batch.tokens.dispatch(decode, prefill, x, ids.reshape(-1, 1))
        return [(y + base[0] if base else y).astype(out)]

    return run


IMPLEMENTATIONS = (Implementation(CHOSEN_LINEAR, "a row at a time, or tiles of an adapter's", build_chosen),)
