"""The long form of tests/engine/test_simulation.py: python -m bench.check.simulate_engine --seeds 0 20 --steps 50000.

Prints a line for a seed that breaks an invariant, with the command that replays it, and one JSON document at the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.engine.simulation import Simulation


def one(work: tuple[int, int, float]) -> tuple[Counter[str], float, str | None]:
    """What a seed came to, the longest that a request took, and what broke."""
    seed, steps, faults = work
    logging.disable(logging.CRITICAL)
    simulation = Simulation(seed, faults=faults)
    failure = None
    try:
        simulation.run(steps)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        failure = "".join(traceback.format_exception(error, limit=-3))
    engine = simulation.engine
    counts = Counter(simulation.results)
    counts.update(
        steps=engine.stats.steps,
        preempted=engine.scheduler.preempted,
        restarts=engine.stats.restarts,
        evictions=engine.cache.prefixes.evictions,
        known_tokens=engine.stats.known_tokens,
        drawn_tokens=engine.stats.drawn_tokens,
    )
    return counts, simulation.longest, failure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 20), metavar=("FIRST", "END"))
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--faults", type=float, default=0.0, help="probability that a step breaks")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    work = [(seed, args.steps, args.faults) for seed in range(*args.seeds)]
    began, counts, longest, broken = time.perf_counter(), Counter[str](), 0.0, 0
    with ProcessPoolExecutor(args.processes) as pool:
        for (seed, *_), (found, waited, failure) in zip(work, pool.map(one, work)):
            counts += found
            longest = max(longest, waited)
            if failure is not None:
                broken += 1
                again = f"--seeds {seed} {seed + 1} --steps {args.steps} --faults {args.faults}"
                print(f"seed {seed}: {failure}replay: python -m bench.check.simulate_engine {again}", file=sys.stderr)
    seconds = round(time.perf_counter() - began, 1)
    print(
        json.dumps({"broken": broken, "longest_s": round(longest, 2), "seconds": seconds, **dict(sorted(counts.items()))})
    )
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
