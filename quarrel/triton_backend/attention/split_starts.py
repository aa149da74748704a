"""Where the splits of each sequence's keys begin, found on the device: the lengths never come to the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quarrel.triton_backend.attention.splits import MOST_SPLITS, split_keys, split_of
from quarrel.triton_backend.runtime.launch import launch, power_of_two


@triton.jit(do_not_specialize=["seqs"])
def start_splits(starts, query_start, kv_len, seqs, SPLIT: tl.constexpr, MOST: tl.constexpr, B: tl.constexpr):
    s = tl.arange(0, B)
    keys = tl.load(kv_len + s, mask=s < seqs, other=0)
    count = tl.minimum(tl.maximum((keys + SPLIT - 1) // SPLIT, 1), MOST)
    split = tl.maximum(split_of(keys, count), 1)
    total = tl.cumsum((keys + split - 1) // split, 0)
    tl.store(starts + 1 + s, total, mask=s < seqs)
    tl.store(starts + s, 0, mask=s == 0)
    tl.store(query_start + s, s, mask=s <= seqs)


def split_starts(kv_len: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of sequences with one new token each, int32 `[S]`: where their items begin, as `inputs.item_starts` has it, and their
    queries; both `[S + 1]`."""
    seqs = kv_len.shape[0]
    starts, query_start = (torch.empty(seqs + 1, dtype=torch.int32, device=kv_len.device) for _ in range(2))
    split, width = split_keys(seqs), power_of_two(seqs + 1)
    launch(start_splits, (1,), starts, query_start, kv_len, seqs, SPLIT=split, MOST=MOST_SPLITS, B=width)
    return starts, query_start
