"""Which experts are on the device: those of a skewed choice, at a bounded cost, and nothing moves where all are alike."""

from __future__ import annotations

import numpy as np
import pytest

from quarrel.triton_backend.experts.residency import STEP_BYTES, Residency

LAYERS, EXPERTS, USED, SLOTS = 4, 32, 4, 31


def run(residency: Residency, odds: np.ndarray, steps: int, rng: np.random.Generator, rows: int = 4) -> tuple[float, int]:
    """The share of choices that were there in the last fifty steps, and the moves of all. odds: `[layers, experts]`."""
    found, moves = [], 0
    for _ in range(steps):
        moves += len(residency.moves())
        draws = rng.gumbel(size=(rows, *odds.shape)) + np.log(odds)
        ids = np.argsort(-draws, -1)[..., :USED] + (np.arange(LAYERS) * EXPERTS)[:, None]
        found.append((residency.slot_of[ids] >= 0).mean())
        residency.use(ids.reshape(-1))
        there = np.flatnonzero(residency.slot_of >= 0)
        assert sorted(residency.slot_of[there]) == list(range(SLOTS))
        assert np.array_equal(residency.slot_of[residency.expert_in], np.arange(SLOTS))
    return float(np.mean(found[-50:])), moves


def skewed(rng: np.random.Generator) -> np.ndarray:
    return np.stack([rng.permutation(1 / np.arange(1, EXPERTS + 1)) for _ in range(LAYERS)])


def test_the_experts_of_a_skewed_choice_come_and_a_shift_is_followed() -> None:
    rng = np.random.default_rng(1)
    odds, residency = skewed(rng), Residency(LAYERS * EXPERTS, SLOTS, 1 << 20)
    assert run(residency, odds, 50, rng)[0] < 0.5
    first, _ = run(residency, odds, 250, rng)
    after, _ = run(residency, odds[::-1], 50, rng)
    again, _ = run(residency, odds[::-1], 600, rng)
    assert first > 0.55 > 0.4 > after
    assert again > 0.55
    _, more = run(residency, odds[::-1], 200, rng)
    assert more < SLOTS // 4  # what is there stays


@pytest.mark.parametrize("rows", [1, 16])
def test_where_all_are_used_alike_hardly_anything_moves(rows: int) -> None:
    residency = Residency(LAYERS * EXPERTS, SLOTS, 1 << 20)
    _, moves = run(residency, np.ones((LAYERS, EXPERTS)), 500, np.random.default_rng(2), rows)
    assert moves <= 5


@pytest.mark.parametrize(("size", "most"), [(STEP_BYTES // 3, SLOTS), (STEP_BYTES * 5 // 2, 40 // 3)])
def test_a_step_moves_a_bounded_number_of_bytes(size: int, most: int) -> None:
    residency = Residency(LAYERS * EXPERTS, SLOTS, size)
    missing = np.flatnonzero(residency.slot_of < 0)
    residency.use(np.repeat(missing, 1000))
    moves = [len(residency.moves()) for _ in range(40)]
    assert sum(moves) == most
    # No more than the steps so far have earned, and an expert larger than a step's bytes comes all the same.
    assert all(sum(moves[:n]) * size <= n * STEP_BYTES for n in range(1, 41))
    assert max(moves) == max(1, STEP_BYTES // size)


def test_the_same_choices_give_the_same_moves() -> None:
    odds = skewed(np.random.default_rng(3))
    one, two = (Residency(LAYERS * EXPERTS, SLOTS, 1 << 20) for _ in range(2))
    for residency in (one, two):
        run(residency, odds, 60, np.random.default_rng(4))
    assert np.array_equal(one.expert_in, two.expert_in)


def test_every_layer_has_as_many_at_first_and_the_most_used_come_first() -> None:
    residency = Residency(LAYERS * EXPERTS, LAYERS * 7, 1 << 20)
    assert np.bincount(residency.expert_in // EXPERTS).tolist() == [7] * LAYERS
    missing = np.flatnonzero(residency.slot_of < 0)[:3]
    residency.use(np.repeat(missing, [100, 300, 200]))
    assert [expert for _, expert in residency.moves()] == missing[[1, 2, 0]].tolist()


@pytest.mark.parametrize("slots", [0, LAYERS * EXPERTS])
def test_none_and_all_have_nothing_to_move(slots: int) -> None:
    residency = Residency(LAYERS * EXPERTS, slots, 1)
    residency.use(np.zeros(500, np.int64))
    assert residency.moves() == []
    assert (residency.slot_of >= 0).sum() == slots
