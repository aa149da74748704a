"""Decoding steps of a model with one form of attention or another: `attend_batch.py` cannot see what runs beside it.

    python bench/attend_steps.py MODEL --out steps.jsonl [--form as-shipped|attend_one|HEADS,KEYS,STAGES] [--split KEYS]
                                 [--tests 8@128,32@640] [--rounds 3]

A test is sequences@tokens that they hold. Run it for each form at once with `--rounds 0` first: that compiles. Splits of
other lengths (`--split`) are for tests of two sequences and more.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from prep import replaced  # noqa: E402

from quarrel.bench.session import How, Session  # noqa: E402
from quarrel.bench.work import Test  # noqa: E402
from quarrel.ops.registry import backend  # noqa: E402
from quarrel.triton_backend import attention, inputs  # noqa: E402
from quarrel.triton_backend.attention import Warps  # noqa: E402

TESTS = "1@128,1@8000,4@4000,8@128,8@640,8@4000,16@640,32@128,32@640,32@2000,64@128,64@640,128@128,128@640"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--form", default="as-shipped")
    parser.add_argument("--split", type=int, help="what `split_keys` says instead")
    parser.add_argument("--tests", default=TESTS)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    given: list[tuple[Any, str, Any]] = []
    if args.form != "as-shipped":
        numbers = [] if args.form == "attend_one" else args.form.split(",")
        if len(numbers) not in (0, 3) or not all(n.isdecimal() for n in numbers):
            parser.error(f"--form {args.form}: wanted as-shipped, attend_one or HEADS,KEYS,STAGES")
        form = Warps(*map(int, numbers)) if numbers else None
        given.append((attention, "warps_for", lambda *_: form))
    if args.split:
        given += [(where, "split_keys", lambda seqs: args.split) for where in (attention, inputs)]
    tests = [
        Test("decode", args.tokens if args.rounds else 4, int(d), int(n))
        for n, d in (t.split("@") for t in args.tests.split(","))
    ]
    if args.split and any(test.batch == 1 for test in tests):
        parser.error("--split: a step of one sequence has splits of its own, so --tests must have none")
    with replaced(*given), args.out.open("a", encoding="utf-8") as out:
        session = Session(backend("triton"), How(rounds=max(1, args.rounds), checked=False))
        for figure in session.model(args.model, tests):
            row = {"form": args.form, "split": args.split, "test": figure.test, "tokens_s": round(figure.speed, 1)}
            print(json.dumps(row), flush=True)
            if args.rounds:
                print(json.dumps(row), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
