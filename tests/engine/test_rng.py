"""Uniform numbers come from seed and position alone, and look like uniform numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quarrel.engine import rng


def test_the_numbers_are_pinned() -> None:
    # Published vectors of splitmix64 with seed 0: its first output is the finaliser of the golden-ratio constant.
    assert rng.mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert rng.mix(2 * 0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    assert [rng.uniform(s, p) for s, p in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 8191))] == PINNED


PINNED = [0.6524484753608704, 0.7879284620285034, 0.3681895136833191, 0.8428878784179688]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 3))
def test_each_number_is_exact_in_float32_and_below_one(seed: int, position: int, lane: int) -> None:
    u = rng.uniform(seed, position, lane)
    assert 0.0 <= u < 1.0
    assert float(np.float32(u)) == u
    assert u == rng.uniform(seed, position, lane)


def test_positions_lanes_and_seeds_are_independent() -> None:
    by_position = np.array([rng.uniform(5, i) for i in range(20000)])
    by_seed = np.array([rng.uniform(i, 5) for i in range(20000)])
    lane = np.array([rng.uniform(5, i, rng.XTC) for i in range(20000)])
    for u in (by_position, by_seed, lane):
        counts = np.histogram(u, 20, (0, 1))[0]
        assert abs(u.mean() - 0.5) < 0.01
        assert (np.abs(counts - 1000) < 5 * 31).all()
    for a, b in ((by_position, by_seed), (by_position, lane), (by_position[1:], by_position[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


def test_alternatives_have_seeds_of_their_own() -> None:
    seeds = [rng.alternative_seed(3, i) for i in range(8)]
    assert seeds[0] == 3
    assert len(set(seeds)) == 8
