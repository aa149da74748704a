"""The paged cache and the recurrent state: arrays whose rows are slots.

Keys lie as `[n_blocks * block_size, n_kv, head_dim]`, so that an append is one scatter of rows, which MLX does in place
when nothing else holds the array, and a head's key is one contiguous run of at least 128 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from quarrel.errors import RequestError, UnsupportedOp
from quarrel.mlx_backend.runtime.launch import Cache
from quarrel.ops.contract import Array, Compute, KVArrays
from quarrel.ops.kv import KVType, decode, encode, scaled
from quarrel.ops.program import KVLayer, StateLayer
from quarrel.ops.step import Limits


def cache_bytes(layers: Sequence[KVLayer], limits: Limits, dtype: mx.Dtype) -> int:
    """Device bytes of all layers."""
    rows = limits.n_blocks * limits.block_size
    return rows * sum(c.row_bytes(limits.kv_cache, dtype.size) for c in layers)


def refuse_type(type: KVType, compute: Compute) -> None:
    """Raises UnsupportedOp for what is not kept here: keys and values have the compute type, or are codes."""
    if type not in ("auto", compute) and not scaled(type):
        reason = f"keys and values are kept as codes or in the compute type here, {compute}: use kv_cache='auto', or 'int8'"
        raise UnsupportedOp("mlx", "attention", f"kv_cache={type}", [reason], "kv_cache")


def allocate(layer: KVLayer, limits: Limits, dtype: mx.Dtype) -> Cache:
    """Zeroed."""
    codes = scaled(limits.kv_cache)
    shape = (limits.n_blocks * limits.block_size, layer.n_kv)
    kept, more = (mx.uint8, 4) if codes else (dtype, 0)
    return Cache(*(mx.zeros((*shape, dim + more), kept) for dim in (layer.head_dim, layer.value_dim)))


def allocate_state(layer: StateLayer, slots: int) -> mx.array:
    """`[slots, ...]` float32 zeros."""
    return mx.zeros((slots, *layer.shape), mx.float32)


def from_host(arrays: KVArrays, dtype: mx.Dtype) -> Cache:
    """The contract's `[C, block_size, n_kv, head_dim]`."""
    k, v = (np.ascontiguousarray(a).reshape(-1, *a.shape[2:]) for a in (arrays.k, arrays.v))
    if not scaled(arrays.type):
        return Cache(mx.array(k).astype(dtype), mx.array(v).astype(dtype))
    pairs = (encode(a, arrays.type) for a in (k, v))
    return Cache(*(mx.array(np.concatenate([codes, s[..., None].view(np.uint8)], -1)) for codes, s in pairs))


def to_host(cache: Cache, block_size: int, type: KVType = "auto") -> KVArrays:
    """float32 in the contract's shape."""

    def values(a: mx.array) -> Array:
        if not scaled(type):
            return np.array(a.astype(mx.float32))
        raw = np.array(a)
        return decode(raw[..., :-4], np.ascontiguousarray(raw[..., -4:]).view(np.float32)[..., 0], type)

    k, v = (x.reshape(-1, block_size, *x.shape[1:]) for x in map(values, cache))
    return KVArrays(k, v, type)


def copy_rows(array: mx.array, pairs: Sequence[tuple[int, int]], per: int, what: str) -> mx.array:
    """Copies runs of `per` rows, (source, destination) counted in runs; every source is read before anything is written."""
    count = array.shape[0] // per
    bad = [p for p in pairs if not (0 <= p[0] < count and 0 <= p[1] < count)]
    if bad:
        raise RequestError(f"{what} {bad[0]} are copied where there are {count}: wanted 0 to {count - 1}")
    runs = array.reshape(count, per, *array.shape[1:])
    source, target = (mx.array([p[i] for p in pairs], mx.int32) for i in (0, 1))
    runs[target] = runs[source]
    return runs.reshape(array.shape)


def put_rows(array: mx.array, at: mx.array, rows: mx.array) -> mx.array:
    """`array` with `rows` at the first-axis indices `at`; the caller's array keeps its values.

    A kernel's outputs are always new buffers, so that what stays in place is MLX's own scatter: it writes into the old
    buffer once nothing else refers to it, as a step's cache from the step before, and copies otherwise.
    """
    new = array.reshape(array.shape)  # another handle: an assignment by index changes the one it is made through
    new[at] = rows.astype(array.dtype)
    return new
