"""Random shapes through every op of a backend, compared with the NumPy reference, until the time is up.

    python -m fuzz.fuzz_ops --backend cpu --seconds 60 [--op linear] [--compute float32] [--seed 7]

Each failing case is shrunk by hypothesis and printed as a `Case(...)` to paste into the op's `cases()`. NaN canaries: an
output that an implementation leaves unwritten, or one poisoned by a neighbour, is not finite and fails.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Iterator

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed

from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.contract import Case, KVArrays, Op, rel_error
from quarrel.ops.reference import run_op
from quarrel.ops.registry import backend as create_backend
from quarrel.ops.step import Backend, ComputeChoice

OPS = {**ALL_OPS, **EXTRA_OPS}


def check_case(backend: Backend, op: Op, case: Case, compute: ComputeChoice, seed: int = 0) -> None:
    """Runs one case on the backend; `AssertionError` says which result is off, by how much, and what was allowed."""
    assert op.make is not None
    inputs = op.make(case, np.random.default_rng(seed))
    want = run_op(op, case.spec, inputs)
    got = backend.run_op(op, case.spec, inputs, compute)
    allowed = op.tolerance[backend.compute_of(compute)]
    assert len(got) == len(want), f"{op.name} gave {len(got)} results, wanted {len(want)}"
    for name, mine, theirs in _pairs(op, case, got, want):
        if theirs.dtype.kind == "i":
            assert np.array_equal(mine, theirs), f"{op.name}.{name} differs for {case}: {mine} against {theirs}"
        else:
            error = rel_error(mine, theirs)
            assert error <= allowed, f"{op.name}.{name} is off by {error:.2e} (allowed {allowed:.0e}) for {case}"


def _pairs(op: Op, case: Case, got: tuple, want: tuple) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:  # type: ignore[type-arg]
    names = [p.name for p in op.results(case.spec)] + [op.consumes]
    for name, mine, theirs in zip(names, got, want, strict=False):
        if isinstance(theirs, KVArrays):
            yield f"{name}.k", mine.k, theirs.k
            yield f"{name}.v", mine.v, theirs.v
        else:
            yield name, mine, theirs


def fuzz_op(backend: Backend, op: Op, compute: ComputeChoice, examples: int, seed: int) -> None:
    """`examples` random cases of one op."""
    assert op.strategy is not None, f"{op.name} has no strategy"

    @with_seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(op.strategy())
    def property(case: Case) -> None:
        # crc32 rather than hash(): a replay in another process draws the same inputs
        check_case(backend, op, case, compute, zlib.crc32(repr(case).encode()))

    property()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--op", choices=list(OPS), action="append")
    parser.add_argument("--compute", choices=["auto", "float32", "float16", "bfloat16"], action="append")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    backend = create_backend(args.backend)
    names = args.op or list(OPS)
    end, seed, done = time.monotonic() + args.seconds, args.seed, 0
    while time.monotonic() < end:
        for name in names:
            for compute in args.compute or ["auto", "float32"]:
                fuzz_op(backend, OPS[name], compute, 25, seed)
                done += 25
        seed += 1
    print(
        f"{done} cases of {', '.join(names)} on {backend.device()} agree with the reference (seeds {args.seed}..{seed - 1})"
    )


if __name__ == "__main__":
    main()
