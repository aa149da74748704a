"""Cache blocks of this backend in the form that all share (`ops/transfer.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quarrel.ops.step import Limits
from quarrel.ops.transfer import CacheForm, nothing
from quarrel.triton_backend.runtime.arrays import Cache
from quarrel.triton_backend.runtime.cache import WIDER

_SCALE = 4
"""Bytes of a head's scale, behind its codes."""
_PORTABLE = 1
"""cudaHostRegisterPortable."""


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


def read_blocks(caches: Sequence[Cache], blocks: Sequence[int], into: Sequence[np.ndarray]) -> list[np.ndarray]:
    """See `ops.transfer.Transfers`. Into memory that is not pinned, it waits."""
    if not caches:
        return []
    device = caches[0].k.device
    index, found, given = _index(blocks, device), list[np.ndarray](), iter(into)
    for cache in caches:
        for i, tensor in enumerate((cache.k, cache.v)):
            rows = _bytes(tensor.index_select(0, index).permute(0, 2, 1, 3))
            if cache.scales:
                scales = cache.scales[i].index_select(0, index).permute(0, 2, 1) / WIDER[cache.kind]
                rows = torch.cat([rows, _bytes(scales[..., None])], -1)
            host = torch.from_numpy(next(given)) if into else _pinned(rows.shape, device)
            host.copy_(rows, non_blocking=host.is_pinned())
            found.append(host.numpy())
    return found


def write_blocks(
    caches: Sequence[Cache],
    blocks: Sequence[int],
    arrays: Sequence[np.ndarray],
    upload: Callable[[np.ndarray], torch.Tensor],
) -> None:
    """See `ops.transfer.Transfers`. upload: moves arrays in memory that is not pinned."""
    if not caches:
        return
    device, given = caches[0].k.device, iter(arrays)
    index = _index(blocks, device)
    for cache in caches:
        for i, tensor in enumerate((cache.k, cache.v)):
            array = next(given)
            host = torch.from_numpy(array) if array.flags.writeable and array.flags.c_contiguous else None
            rows = upload(array) if host is None or not host.is_pinned() else host.to(device, non_blocking=True)
            if cache.scales:
                rows, scales = rows[..., :-_SCALE], rows[..., -_SCALE:].contiguous().view(torch.float32)[..., 0]
                cache.scales[i].index_copy_(0, index, scales.permute(0, 2, 1) * WIDER[cache.kind])
            tensor.index_copy_(0, index, rows.contiguous().view(tensor.dtype).permute(0, 2, 1, 3))


def transferred(device: torch.device) -> Callable[[], None]:
    """See `ops.transfer.Transfers`."""
    if device.type != "cuda":
        return nothing
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def pin(memory: np.ndarray, device: torch.device) -> Callable[[], None]:
    """Likewise. A thread that launches does not call this: where it fails, CUDA tells that thread's next launch, too."""
    if device.type != "cuda":
        return nothing
    runtime, pointer = torch.cuda.cudart(), memory.ctypes.data
    with torch.cuda.device(device):
        failed = int(runtime.cudaHostRegister(pointer, memory.nbytes, _PORTABLE))
    if failed:
        return nothing

    def end() -> None:
        runtime.cudaHostUnregister(pointer)

    return end


def _index(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    made = torch.tensor(list(blocks), dtype=torch.int64)
    if device.type != "cuda":
        return made
    return _pinned(made.shape, device, made.dtype).copy_(made).to(device, non_blocking=True)  # waits for no launch


def _pinned(shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Memory on the host that a GPU copies from and to by itself, if it can; PyTorch keeps what was given back for the
    next."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=device.type == "cuda")
    except RuntimeError:  # a host that pins no more
        return torch.empty(tuple(shape), dtype=dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
