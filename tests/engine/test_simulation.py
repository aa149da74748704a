"""Whatever happens, no block is owned twice or lost, nobody waits for ever, and every text is what it is alone."""

from __future__ import annotations

import os

import pytest

from tests.engine.simulation import Simulation

TENS = 6 if os.environ.get("QUARREL_TEST_ALL") == "1" else 3
"""Of seeds; each runs in a third of a second. Half of them by default."""


@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(0, 10 * TENS, 10)], ids=str)
def test_any_order_of_events_gives_everyone_his_own(seeds: range) -> None:
    for seed in seeds:
        Simulation(seed).run(300)


def test_the_simulation_covers_what_it_is_for() -> None:
    seen = Simulation(10)
    assert seen.late
    seen.run(300)
    assert seen.engine.scheduler.preempted
    assert seen.engine.stats.known_tokens
    assert seen.engine.stats.drafted_tokens > seen.engine.stats.drafted_right > 0
    assert {"length", "stop", "cancelled", "DeadlineExceeded", "Diverged"} <= seen.results.keys()


@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(100, 100 + 5 * TENS, 10)], ids=str)
def test_faults_lose_those_in_the_step_and_nobody_else(seeds: range) -> None:
    faults = 0
    for seed in seeds:
        simulation = Simulation(seed, faults=0.02)
        simulation.run(300)
        faults += simulation.engine.stats.faults
    assert faults


def test_nobody_starves() -> None:
    """At most 24 are there at a time, and a batch waits ten seconds longer than what is interactive."""
    for seed in range(200, 203):
        simulation = Simulation(seed)
        simulation.run(1500)
        assert simulation.longest < 30.0
