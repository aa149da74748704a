"""Cache blocks of this backend in the form that all share (`ops/transfer.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quarrel.ops.step import Limits
from quarrel.ops.transfer import CacheForm
from quarrel.triton_backend.runtime.arrays import Cache
from quarrel.triton_backend.runtime.cache import WIDER

_SCALE = 4
"""Bytes of a head's scale, behind its codes."""


def form_of(caches: Sequence[Cache], states: Sequence[torch.Tensor], limits: Limits) -> CacheForm:
    """What the blocks look like outside."""
    kind = "float32"
    if caches:
        kind = caches[0].kind if caches[0].scales else str(caches[0].k.dtype).removeprefix("torch.")
    layers = []
    for cache in caches:
        widths = (t.shape[3] * t.element_size() + _SCALE * bool(cache.scales) for t in (cache.k, cache.v))
        layers.append((cache.k.shape[1], *widths))
    return CacheForm(
        kind, limits.block_size, tuple(layers), tuple(tuple(s.shape[1:]) for s in states), limits.window_groups
    )


def read_blocks(caches: Sequence[Cache], blocks: Sequence[int]) -> list[np.ndarray]:
    """Waits for the launches so far."""
    if not caches:
        return []
    device = caches[0].k.device
    index, found = _index(blocks, device), list[torch.Tensor]()
    for cache in caches:
        for i, tensor in enumerate((cache.k, cache.v)):
            rows = _bytes(tensor.index_select(0, index).permute(0, 2, 1, 3))
            if cache.scales:
                scales = cache.scales[i].index_select(0, index).permute(0, 2, 1) / WIDER[cache.kind]
                rows = torch.cat([rows, _bytes(scales[..., None])], -1)
            found.append(_pinned(rows.shape, device).copy_(rows, non_blocking=True))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return [rows.numpy() for rows in found]


def write_blocks(caches: Sequence[Cache], blocks: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
    """Behind the launches so far; the host goes on once it has copied the arrays."""
    if not caches:
        return
    device, given = caches[0].k.device, iter(arrays)
    index = _index(blocks, device)
    for cache in caches:
        for i, tensor in enumerate((cache.k, cache.v)):
            array = next(given)
            staged = _pinned(array.shape, device)
            np.copyto(staged.numpy(), array)
            rows = staged.to(device, non_blocking=True)
            if cache.scales:
                rows, scales = rows[..., :-_SCALE], rows[..., -_SCALE:].contiguous().view(torch.float32)[..., 0]
                cache.scales[i].index_copy_(0, index, scales.permute(0, 2, 1) * WIDER[cache.kind])
            tensor.index_copy_(0, index, rows.contiguous().view(tensor.dtype).permute(0, 2, 1, 3))


def _index(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(blocks), dtype=torch.int64, device=device)


def _pinned(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Bytes on the host that a GPU copies from and to by itself, if it can; PyTorch keeps what was given back for the
    next."""
    try:
        return torch.empty(tuple(shape), dtype=torch.uint8, pin_memory=device.type == "cuda")
    except RuntimeError:  # a host that pins no more
        return torch.empty(tuple(shape), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
