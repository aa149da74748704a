"""The paged cache and the recurrent state: arrays whose rows are slots.

Keys lie as `[n_blocks * block_size, n_kv, head_dim]`, so that a token's are one run, and a head's key one of at least 128
bytes. Our kernels append where the cache lies, through an input that they may write. MLX's scatter does that only while
nothing else holds the array, and a step that is still in flight does: it would copy the cache once a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from quarrel.errors import RequestError, UnsupportedOp
from quarrel.mlx_backend.runtime.kernel import Kernel
from quarrel.mlx_backend.runtime.launch import Cache, cdiv
from quarrel.ops.contract import Array, Compute, KVArrays
from quarrel.ops.kv import KVType, decode, encode, scaled
from quarrel.ops.program import KVLayer, StateLayer
from quarrel.ops.step import Limits

_THREADS = 128


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
    k, v = (mx.zeros((*shape, dim + more), kept) for dim in (layer.head_dim, layer.value_dim))
    return Cache(k, v, mx.zeros(1, mx.int32))


def allocate_state(layer: StateLayer, slots: int) -> mx.array:
    """`[slots, ...]` float32 zeros."""
    return mx.zeros((slots, *layer.shape), mx.float32)


def from_host(arrays: KVArrays, dtype: mx.Dtype) -> Cache:
    """The contract's `[C, block_size, n_kv, head_dim]`."""
    k, v = (np.ascontiguousarray(a).reshape(-1, *a.shape[2:]) for a in (arrays.k, arrays.v))
    if not scaled(arrays.type):
        kept = [mx.array(a).astype(dtype) for a in (k, v)]
    else:
        pairs = (encode(a, arrays.type) for a in (k, v))
        kept = [mx.array(np.concatenate([codes, s[..., None].view(np.uint8)], -1)) for codes, s in pairs]
    mx.eval(kept)
    return Cache(*kept, mx.zeros(1, mx.int32))


def to_host(cache: Cache, block_size: int, type: KVType = "auto") -> KVArrays:
    """float32 in the contract's shape."""

    def values(a: mx.array) -> Array:
        if not scaled(type):
            return np.array(a.astype(mx.float32))
        raw = np.array(a)
        return decode(raw[..., :-4], np.ascontiguousarray(raw[..., -4:]).view(np.float32)[..., 0], type)

    mx.eval(cache.written)
    k, v = (x.reshape(-1, block_size, *x.shape[1:]) for x in map(values, cache[:2]))
    return KVArrays(k, v, type)


# A thread a value of a key, and of a value.
_KEEP = Kernel(
    "quarrel_keep",
    ("k", "v", "slots", "after", "into_keys", "into_values"),
    ("written",),
    """
  const uint row = threadgroup_position_in_grid.y;
  const int i = int(thread_position_in_grid.x);
  const ulong slot = ulong(slots[row]);
  if (i < KEY) ((device C*)into_keys)[slot * KEY + i] = C(k[ulong(row) * KEY + i]);
  if (i < VALUE) ((device C*)into_values)[slot * VALUE + i] = C(v[ulong(row) * VALUE + i]);
  if (row == 0 && i == 0) written[0] = 1;
""",
)


def keep(cache: Cache, k: mx.array, v: mx.array, slots: mx.array) -> Cache:
    """Rows of k and v `[T, n_kv, ...]`, of any float type or the codes that are kept, written to their slots."""
    widths = [a.size // max(1, a.shape[0]) for a in (cache.k, cache.v)]
    template = [("C", cache.k.dtype), ("KEY", widths[0]), ("VALUE", widths[1])]
    groups = (cdiv(max(widths), _THREADS), slots.shape[0])
    (written,) = _KEEP([k, v, slots, cache.written, cache.k, cache.v], [(1,)], [mx.int32], groups, (_THREADS,), template)
    return cache._replace(written=written)


def copy_blocks(cache: Cache, pairs: Sequence[tuple[int, int]], size: int) -> Cache:
    """Copies blocks of `size` tokens, (source, destination); every source is read before anything is written. What has
    been launched must be done: MLX's gather does not wait for what kernels wrote through an input."""
    _refuse_outside(pairs, cache.k.shape[0] // size, "cache blocks")
    source, target = (mx.array([p[i] * size + j for p in pairs for j in range(size)], mx.int32) for i in (0, 1))
    rows = [a[source] for a in cache[:2]]
    mx.eval(rows)
    copied = keep(cache, *rows, target)
    mx.eval(copied.written)
    return copied


def copy_rows(array: mx.array, pairs: Sequence[tuple[int, int]], what: str) -> mx.array:
    """Copies rows (source, destination); every source is read before anything is written."""
    _refuse_outside(pairs, array.shape[0], what)
    source, target = (mx.array([p[i] for p in pairs], mx.int32) for i in (0, 1))
    return put_rows(array, target, array[source])


def _refuse_outside(pairs: Sequence[tuple[int, int]], count: int, what: str) -> None:
    bad = [p for p in pairs if not (0 <= p[0] < count and 0 <= p[1] < count)]
    if bad:
        raise RequestError(f"{what} {bad[0]} are copied where there are {count}: wanted 0 to {count - 1}")


def put_rows(array: mx.array, at: mx.array, rows: mx.array) -> mx.array:
    """`array` with `rows` at the first-axis indices `at`; the caller's array keeps its values.

    MLX's scatter writes into the old buffer once nothing else refers to it, and copies it otherwise: for recurrent states,
    which are small beside what a step reads.
    """
    new = array.reshape(array.shape)  # another handle: an assignment by index changes the one it is made through
    new[at] = rows.astype(array.dtype)
    return new
