"""Cache blocks of this backend in the form that all share (`ops/transfer.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from quarrel.mlx_backend.runtime.cache import keep
from quarrel.mlx_backend.runtime.launch import Cache
from quarrel.ops.contract import Array
from quarrel.ops.step import Limits
from quarrel.ops.transfer import CacheForm


def form_of(caches: Sequence[Cache], states: Sequence[mx.array], limits: Limits) -> CacheForm:
    """What the blocks look like outside."""
    kind = "float32"
    if caches:
        codes = caches[0].k.dtype == mx.uint8
        kind = limits.kv_cache if codes else str(caches[0].k.dtype).removeprefix("mlx.core.")
    layers = tuple((c.k.shape[1], *(a.shape[2] * a.dtype.size for a in c[:2])) for c in caches)
    return CacheForm(kind, limits.block_size, layers, tuple(s.shape[1:] for s in states), limits.window_groups)


def read_blocks(cache: Cache, blocks: Sequence[int], size: int) -> list[Array]:
    """Keys, and values. What has been launched must be done, as for `copy_blocks`."""
    rows = _rows(blocks, size)
    return [np.array(a[rows].view(mx.uint8)).reshape(len(blocks), size, a.shape[1], -1) for a in cache[:2]]


def write_blocks(cache: Cache, blocks: Sequence[int], k: Array, v: Array) -> None:
    """Likewise."""
    flat = (np.ascontiguousarray(a).reshape(-1, *a.shape[2:]) for a in (k, v))
    rows = [mx.array(a).view(own.dtype) for a, own in zip(flat, cache[:2])]
    mx.eval(keep(cache, *rows, _rows(blocks, k.shape[1])).written)


def _rows(blocks: Sequence[int], size: int) -> mx.array:
    return mx.array([block * size + j for block in blocks for j in range(size)], mx.int32)
