"""The long form of tests/engine/test_simulation.py: python -m bench.check.simulate_engine --seeds 0 20 --steps 50000.

With --seconds it goes on with further seeds until the time is up. Prints a line for a seed that breaks an invariant, with
the command that replays it, and one JSON document at the end, which --out also has after each seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count
from pathlib import Path

from tests.engine.simulation import Simulation

Found = tuple[Counter[str], float, str | None]


def one(seed: int, steps: int, faults: float) -> Found:
    """What a seed came to, the longest that a request took, and what broke."""
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
        faults=engine.stats.faults,
        evictions=engine.cache.prefixes.evictions,
        known_tokens=engine.stats.known_tokens,
        drawn_tokens=engine.stats.drawn_tokens,
    )
    return counts, simulation.longest, failure


def every(args: argparse.Namespace) -> Iterator[tuple[int, Found]]:
    """Seeds as they are done, `--jobs` at a time."""
    end = time.monotonic() + args.seconds if args.seconds else float("inf")
    seeds = iter(count(args.seeds[0]) if args.seconds else range(*args.seeds))
    running: dict[Future[Found], int] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        while True:
            while len(running) < args.jobs and time.monotonic() < end and (seed := next(seeds, None)) is not None:
                running[pool.submit(one, seed, args.steps, args.faults)] = seed
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 20), metavar=("FIRST", "END"))
    parser.add_argument("--seconds", type=float, default=0.0, help="begin seeds from FIRST on for so long, whatever END is")
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--faults", type=float, default=0.0, help="probability that a step breaks")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began, counts, longest, broken = time.perf_counter(), Counter[str](), 0.0, []
    document = ""
    for seed, (found, waited, failure) in every(args):
        counts += found
        longest = max(longest, waited)
        counts["seeds"] += 1
        if failure is not None:
            again = f"--seeds {seed} {seed + 1} --steps {args.steps} --faults {args.faults}"
            broken.append(again)
            print(f"seed {seed}: {failure}replay: python -m bench.check.simulate_engine {again}", file=sys.stderr)
        seconds = round(time.perf_counter() - began, 1)
        figures = {
            "broken": broken,
            "longest_s": round(longest, 2),
            "seconds": seconds,
            "jobs": args.jobs,
            "faults_p": args.faults,
        }
        document = json.dumps({**figures, **dict(sorted(counts.items()))})
        if args.out:
            args.out.write_text(document + "\n", "utf-8")
    print(document)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
