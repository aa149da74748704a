"""Random shapes and values through every op of a backend, compared with the NumPy reference, until the time is up.

    python -m fuzz.ops --seconds 600 --backend mlx [--op linear] [--compute float32] [--seed 7]
    python -m fuzz.ops --backend mlx --op linear --compute float16 --twist nan:3 --case "Case(...)"

Values are ordinary, tied, zero, subnormal or scaled, or one row holds a NaN or an infinity, which must not reach any other.
A failure is shrunk by hypothesis and printed as a line of the second form; the other ops go on. Outputs are NaN before a
kernel writes them, so that what one leaves unwritten fails. Without Metal the mlx backend runs on the emulator with every
access checked, without CUDA the triton backend in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from hypothesis import strategies as st

from fuzz.reproduction import case_of, text_of
from fuzz.running import arguments, examples, rounds
from fuzz.values import Twist, check, twists
from quarrel.errors import UnsupportedOp
from quarrel.ops import ALL_OPS, EXTRA_OPS
from quarrel.ops.contract import Case, Op
from quarrel.ops.registry import backend as create_backend
from quarrel.ops.step import Backend, ComputeChoice

OPS = {**ALL_OPS, **EXTRA_OPS}
EACH = 10
"""Draws of an op and arithmetic in a round. The time is looked at between two ops."""


def seed_of(case: Case) -> int:
    """The seed of a case's values: not hash(), so that another process draws the same."""
    return zlib.crc32(repr(case).encode())


def fuzz_op(backend: Backend, op: Op, compute: ComputeChoice, count: int, seed: int) -> int:
    """`count` random cases of one op; how many the backend did not decline. What is raised has the line that repeats it
    as a note."""
    assert op.strategy is not None, f"{op.name} has no strategy"
    taken = 0

    def one(drawn: tuple[Case, Twist]) -> None:
        nonlocal taken
        case, twist = drawn
        try:
            check(backend, op, case, compute, twist, seed_of(case))
        except UnsupportedOp:
            # Declined with a reason, as caches of codes are by some: what must not be declined, the tests of cases know.
            return
        except Exception as error:
            error.add_note(line_of(backend.name, op, compute, case, twist))
            raise
        taken += 1

    examples(st.tuples(op.strategy(), twists(op)), count, seed, one)
    return taken


def line_of(backend: str, op: Op, compute: ComputeChoice, case: Case, twist: Twist) -> str:
    """The command that runs one case again."""
    options = ["--backend", backend, "--op", op.name, "--compute", compute, "--twist", str(twist), "--case", text_of(case)]
    return f"python -m fuzz.ops {shlex.join(options)}"


def standing_in(name: str) -> AbstractContextManager[object]:
    """The emulator, with all its checks, where the mlx backend is asked for and there is no Metal."""
    if name != "mlx":
        return nullcontext()
    import mlx.core as mx

    from tools.metal_emulator import Mode, Settings, install

    return nullcontext() if mx.metal.is_available() else install(Settings(mode=Mode.CHECK))


def main(given: Sequence[str] | None = None) -> int:
    """Command line; 1 if anything failed."""
    parser = arguments(__doc__)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--op", choices=list(OPS), action="append")
    parser.add_argument("--compute", choices=["auto", "float32", "float16", "bfloat16"], action="append")
    parser.add_argument("--case", help="one case, as a failure prints it")
    parser.add_argument("--twist", type=Twist.parse, default=Twist())
    args = parser.parse_args(given)
    if args.backend == "triton":
        _interpret()
    with standing_in(args.backend):
        backend = create_backend(args.backend)
        if args.case is not None:
            return _again(backend, args)
        return _run(backend, args)


def _interpret() -> None:
    """Triton reads the variable when it is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _again(backend: Backend, args: argparse.Namespace) -> int:
    case = case_of(args.case)
    for name in args.op or ():
        for compute in args.compute or ["auto"]:
            check(backend, OPS[name], case, compute, args.twist, seed_of(case))
    print("the case agrees with the reference")
    return 0


def _run(backend: Backend, args: argparse.Namespace) -> int:
    names, done, failures = args.op or list(OPS), 0, {}
    reached: set[str] = set()
    declined: set[str] = set()
    end = time.monotonic() + args.seconds

    def one(seed: int) -> None:
        nonlocal done
        turn = seed % len(names)
        for name in (*names[turn:], *names[:turn]):
            for compute in args.compute or ["auto", "float32"]:
                if (name, compute) in failures or (done and time.monotonic() > end):
                    continue
                try:
                    taken = fuzz_op(backend, OPS[name], compute, EACH, seed)
                    done += taken
                    (reached if taken else declined).add(name)
                except Exception as error:
                    failures[name, compute] = error
                    lines = getattr(error, "__notes__", [])
                    print(f"FAILED {name} {compute}: {type(error).__name__}: {error}", *lines[:1], sep="\n", flush=True)

    count = rounds(args.seconds, args.seed, one)
    of = f"{done} cases of {len(reached)} ops on {backend.device()}, seeds {args.seed} to {args.seed + count - 1}"
    print(f"{of}: {len(failures)} failed" if failures else f"{of}: all agree with the reference")
    if never := sorted(declined - reached - {name for name, _ in failures}):
        print(f"{backend.name} declined every case of {', '.join(never)}: none was compared")
    return 1 if failures or never else 0


if __name__ == "__main__":
    sys.exit(main())
