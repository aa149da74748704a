"""Splits of a sequence's keys: on the host, for one sequence and for many, and on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quarrel.triton_backend.attention.split_starts import split_starts
from quarrel.triton_backend.attention.splits import (
    MOST_SPLITS,
    SPLIT,
    STEP,
    most_splits,
    split_keys,
    splits_of,
    splits_of_one,
)
from quarrel.triton_backend.runtime.launch import power_of_two

LENGTHS = np.array([*range(1, 700), 8191, 8192, 8193, 32000, 131072, 1 << 20])


def test_splits_follow_the_length_alone() -> None:
    assert splits_of(np.array([0, 1, 128, 129, 1000, 8192, 8193, 32000])).tolist() == [0, 1, 1, 2, 8, 64, 52, 63]
    assert splits_of(LENGTHS).tolist() == [splits_of_one(int(n)) for n in LENGTHS]
    assert splits_of_one(0) == 0


@pytest.mark.parametrize("seqs", [1, 5, 65])
def test_splits_are_whole_steps_of_one_length_and_not_too_many(seqs: int) -> None:
    split = split_keys(seqs)
    splits = splits_of(LENGTHS, split)
    assert splits.max() <= MOST_SPLITS
    assert (splits <= -(-LENGTHS // split)).all()
    for keys, count in zip(LENGTHS, splits, strict=True):
        longest = max(split, -(-keys // MOST_SPLITS) + STEP)
        assert any(-(-keys // split) == count for split in range(STEP, longest + STEP, STEP)), keys


def test_a_padded_batch_has_the_splits_of_its_sequences() -> None:
    assert all(split_keys(n) == split_keys(power_of_two(n)) for n in range(1, 200))


def test_items_of_a_full_cache_are_bounded() -> None:
    assert most_splits(8192, 2) == 66
    for parts in ([8192], [4000, 4192], [129] * 63):
        assert splits_of(np.array(parts)).sum() <= most_splits(sum(parts), len(parts))
        assert most_splits(SPLIT * 10_000, len(parts)) == MOST_SPLITS * len(parts)


@pytest.mark.parametrize("seqs", [1, 7, 80])
def test_the_device_finds_the_same_splits(seqs: int) -> None:
    lengths = np.random.default_rng(0).choice(LENGTHS, seqs)
    starts, query_start = split_starts(torch.from_numpy(lengths.astype(np.int32)))
    assert starts.tolist() == [0, *np.cumsum(splits_of(lengths, split_keys(seqs)))]
    assert query_start.tolist() == list(range(seqs + 1))
