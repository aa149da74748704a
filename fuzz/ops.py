"""Random shapes through every op of a backend, compared with the NumPy reference, until the time is up.

    python -m fuzz.fuzz_ops --backend cpu --seconds 60 [--op linear] [--compute float32] [--seed 7]

Each failing case is shrunk by hypothesis and printed as a `Case(...)` to paste into the op's `cases()`. NaN canaries: an
output that an implementation leaves unwritten, or one poisoned by a neighbour, is not finite and fails.
"""

from __future__ import annotations

import argparse
import time
import zlib
from contextlib import AbstractContextManager, nullcontext

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed

from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.compare import check_case
from quarrel.ops.contract import Case, Op
from quarrel.ops.registry import backend as create_backend
from quarrel.ops.step import Backend, ComputeChoice
from tools.metal_emulator import Mode, Settings, install

OPS = {**ALL_OPS, **EXTRA_OPS}


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


def standing_in(name: str) -> AbstractContextManager[object]:
    """The emulator, with all its checks, where the mlx backend is asked for and there is no Metal."""
    if name != "mlx":
        return nullcontext()
    import mlx.core as mx

    return nullcontext() if mx.metal.is_available() else install(Settings(mode=Mode.CHECK))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--op", choices=list(OPS), action="append")
    parser.add_argument("--compute", choices=["auto", "float32", "float16", "bfloat16"], action="append")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with standing_in(args.backend):
        run(args)


def run(args: argparse.Namespace) -> None:
    """Rounds over the ops until the time is up."""
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
