"""Splits of a sequence's keys: on the host, for one sequence and for many, and on the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quarrel.ops.attention import AttentionSpec
from quarrel.triton_backend.attention.paged import WIDE_SPLITS, short_splits, splits_for
from quarrel.triton_backend.attention.split_starts import split_starts
from quarrel.triton_backend.attention.splits import (
    MOST_SPLITS,
    SPLIT,
    STEP,
    most_splits,
    split_keys,
    splits_of,
    splits_of_one,
    whole_rounds,
)
from quarrel.triton_backend.inputs import item_bucket, item_starts
from quarrel.triton_backend.runtime.launch import power_of_two
from tests.triton_backend.cases import DEVICE

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


@pytest.mark.parametrize("most", [1, 5, 33, MOST_SPLITS])
def test_a_kernel_finds_the_length_of_splits_from_how_many_there_are(most: int) -> None:
    keys = np.arange(1, 20_000)
    for split in (SPLIT, 2 * SPLIT, 8 * SPLIT):
        splits = splits_of(keys, split, most)
        chosen = np.clip(-(-keys // split), 1, most)
        assert (-(-keys // (splits * STEP)) == -(-keys // (chosen * STEP))).all()
        assert splits.max() <= most
    assert [splits_of_one(int(n), most) for n in keys[::97]] == splits_of(keys, SPLIT, most)[::97].tolist()


@pytest.mark.parametrize("short", [0, 1, 32, MOST_SPLITS])
def test_one_sequence_has_splits_of_a_tile_as_long_as_they_are_few(short: int) -> None:
    for keys in [*range(1, 200), 1000, 1024, 1025, 5000, 32000]:
        splits = splits_of_one(keys, short=short)
        split = -(-keys // (splits * STEP)) * STEP
        assert splits == -(-keys // split) <= MOST_SPLITS
        assert split == STEP or keys > short * STEP
        assert splits >= splits_of_one(keys)


def test_layers_share_how_many_splits_are_short() -> None:
    wide, narrow = (AttentionSpec(2, 1, width, 1.0) for width in (256, 128))
    latent = AttentionSpec(2, 1, 64, 1.0, latent=512)
    assert [short_splits(layers) for layers in ([], [narrow], [wide, narrow], [wide, latent], [narrow, latent])] == [0] * 5
    assert short_splits([wide, wide]) == WIDE_SPLITS
    assert short_splits([latent]) == MOST_SPLITS


def test_splits_of_few_sequences_fill_the_device() -> None:
    places = 2 * 132
    assert [whole_rounds(n, places) for n in (1, 2, 4, 6, 8, 16, 32, 40)] == [64, 64, 64, 44, 33, 16, 8, 13]
    assert whole_rounds(8, 2 * 148) == 37  # B200
    assert whole_rounds(7, 10) == MOST_SPLITS


@pytest.mark.parametrize("processors", [58, 108, 114, 128, 132, 148, 170])
def test_no_depth_takes_more_rounds_for_it(processors: int) -> None:
    """Keys that the device walks one after the other, where each round begins with what 128 keys take."""
    keys, places = np.array([*range(32, 9000, 32), *range(9000, 140_000, 997)]), 2 * processors

    def walked(n_kv: int, seqs: int, most: int) -> np.ndarray:
        splits = splits_of(keys, SPLIT, most)
        rounds = -(-splits * n_kv * seqs // places)
        return rounds * (-(-keys // (splits * STEP)) * STEP + 128)

    for n_kv in range(1, 65):
        for seqs in (1, 2, 4):
            before, now = (walked(n_kv, seqs, most) for most in (MOST_SPLITS, whole_rounds(n_kv, places)))
            assert (now / before).max() < 1.06, (n_kv, seqs)
            assert now.sum() <= before.sum(), (n_kv, seqs)


def test_only_layers_alike_whose_kernel_was_measured_have_fewer_splits() -> None:
    spec = AttentionSpec(32, 8, 128, 0.1)
    assert splits_for([spec, spec], "float16", "plain", 9, 132) == 33
    assert splits_for([spec], "bfloat16", "int8", 9, 132) == 33
    assert splits_for([replace(spec, window=SPLIT), spec], "float16", "plain", 8, 132) == 33
    for others in ([replace(spec, n_kv=4)], [replace(spec, window=SPLIT + 1)], [replace(spec, head_dim=64)]):
        assert splits_for([spec, *others], "float16", "plain", 9, 132) == MOST_SPLITS
    assert splits_for([spec], "float32", "plain", 9, 132) == MOST_SPLITS
    assert splits_for([spec], "float16", "int8", 8, 132) == MOST_SPLITS


def test_steps_of_few_sequences_have_no_more_splits_than_they_may() -> None:
    lengths = np.array([32_000, 600, 5000, 1, 7])
    starts = [item_starts(np.arange(n + 1), lengths[:n], most=33) for n in (1, 4, 5)]
    assert [each.tolist() for each in starts] == [
        [0, 33],
        [0, 33, 38, 70, 71],
        [0, 63, 66, 86, 87, 88],
    ]
    assert item_starts(np.arange(5), lengths[:4], 8, most=33)[-1] == 63 + 3 + 20 + 1
    assert [item_bucket(n, 1, 33) for n in (1, 5, 16, 17, 33)] == [4, 16, 16, 33, 33]
    assert [item_bucket(n, 1, 8) for n in (4, 5, 8)] == [4, 8, 8]
    assert [item_bucket(n, 8, 33) for n in (8, 9, 33, 200)] == [32, 32, 128, 512]
    assert [item_bucket(n, n, splits=False) for n in (1, 4, 5, 8)] == [4, 16, 5, 8]
    assert [item_bucket(n, 2) for n in (9, 33, 300)] == [32, 128, 512]


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
    starts, query_start = split_starts(torch.from_numpy(lengths.astype(np.int32)).to(DEVICE))
    assert starts.tolist() == [0, *np.cumsum(splits_of(lengths, split_keys(seqs)))]
    assert query_start.tolist() == list(range(seqs + 1))
