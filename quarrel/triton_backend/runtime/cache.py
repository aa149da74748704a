"""The paged cache on the device: one pair of tensors a layer, blocks first, heads before tokens.

Within a block a head's keys are one contiguous run, which is what attention reads. One block more than asked for is
kept at the end: rows that pad a batch write there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quarrel.errors import RequestError
from quarrel.ops.contract import KVArrays
from quarrel.ops.kv import KVType, decode, encode, scaled
from quarrel.ops.program import KVLayer, StateLayer
from quarrel.triton_backend.runtime.arrays import Cache

WIDER = {"int8": 128.0, "fp8": 256.0, "fp8_e5m2": 256.0}
"""What the scale of a code is multiplied with: kernels make a 16-bit float of its bits, which is so much too small."""


def dtype_of(type: KVType, act: torch.dtype) -> torch.dtype:
    """The array type of keys and values."""
    if scaled(type):
        return torch.uint8
    return {"auto": act, "float16": torch.float16, "bfloat16": torch.bfloat16}[type]


def cache_bytes(layers: Sequence[KVLayer], n_blocks: int, block_size: int, type: KVType, act: torch.dtype) -> int:
    """Device bytes of all layers; `act` is what the step computes in."""
    return (n_blocks + 1) * block_size * sum(c.row_bytes(type, act.itemsize) for c in layers)


def allocate(
    layer: KVLayer, n_blocks: int, block_size: int, act: torch.dtype, device: torch.device, type: KVType = "auto"
) -> Cache:
    """Zeroed, so that a key which is masked can never be a NaN left in memory."""
    shape = (n_blocks + 1, layer.n_kv, block_size)
    dims = (layer.head_dim, layer.value_dim)
    k, v = (torch.zeros((*shape, dim), dtype=dtype_of(type, act), device=device) for dim in dims)
    if not scaled(type):
        return Cache(k, v)
    return Cache(k, v, type, tuple(torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(2)))


def allocate_state(layer: StateLayer, slots: int, device: torch.device) -> torch.Tensor:
    """`[slots + 1, ...]` float32 zeros; the last slot takes what padding writes."""
    return torch.zeros((slots + 1, *layer.shape), dtype=torch.float32, device=device)


def from_host(arrays: KVArrays, dtype: torch.dtype, device: torch.device) -> Cache:
    """A cache with the contract's `[C, block_size, n_kv, head_dim]` contents, and the padding block."""
    blocks, size = arrays.k.shape[:2]
    made = allocate(KVLayer.of(arrays), blocks, size, dtype, device, arrays.type)
    for i, (target, source) in enumerate(((made.k, arrays.k), (made.v, arrays.v))):
        values = np.ascontiguousarray(source)
        if made.scales:
            values, scale = encode(values, arrays.type)
            wide = torch.from_numpy(scale * np.float32(WIDER[arrays.type]))
            made.scales[i][:blocks] = wide.to(device).permute(0, 2, 1)
        target[:blocks] = torch.from_numpy(values).to(device).permute(0, 2, 1, 3)
    return made


def to_host(cache: Cache, type: KVType) -> KVArrays:
    """float32 in the contract's order, without the padding block."""
    k, v = (t[:-1].permute(0, 2, 1, 3) for t in (cache.k, cache.v))
    if not cache.scales:
        return KVArrays(*(t.float().cpu().numpy().copy() for t in (k, v)), type)
    scales = (s[:-1].permute(0, 2, 1).cpu().numpy() / np.float32(WIDER[type]) for s in cache.scales)
    return KVArrays(*(decode(t.cpu().numpy(), s, type) for t, s in zip((k, v), scales)), type)


def copy_blocks(caches: Sequence[Cache], pairs: Sequence[tuple[int, int]]) -> None:
    """Copies (source, destination) blocks in every layer; all sources are read before any destination is written."""
    if not caches or not pairs:
        return
    n_blocks = caches[0].k.shape[0] - 1
    bad = [p for p in pairs if not (0 <= p[0] < n_blocks and 0 <= p[1] < n_blocks)]
    if bad:
        raise RequestError(f"cache blocks {bad[0]} are copied in a cache of {n_blocks} blocks: wanted 0 to {n_blocks - 1}")
    index = torch.tensor(pairs, dtype=torch.int64, device=caches[0].k.device)
    for cache in caches:
        for tensor in cache.tensors:
            tensor.index_copy_(0, index[:, 1], tensor.index_select(0, index[:, 0]))


def copy_states(states: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copies the state in slots (source, destination) of every layer; all sources are read first."""
    if not states or not pairs:
        return
    index = torch.tensor(pairs, dtype=torch.int64, device=states[0].device)
    for state in states:
        state.index_copy_(0, index[:, 1], state.index_select(0, index[:, 0]))
