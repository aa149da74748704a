"""Experts in host memory: speed by the number of layers that keep them there, and the error of the logits.

    python -m bench.steps.host_experts gpt-oss-20b:MXFP4:6 mixtral-8x7b:Q4_K_M:3 --out FILE.jsonl [--layers 0,1,3]

A model is SHAPE:QUANT:LAYERS of `tools/make_synthetic.py`. A line of JSON for each number of layers.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.shared import FOLDER, Notes, command_line, synthetic, test_named
from quarrel.bench.measure import measure, run
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test
from quarrel.gguf import GGUFFile
from quarrel.ops.contract import Array, rel_error
from quarrel.ops.host import HostExperts, HostsExperts, computing_parts, expert_refs
from quarrel.ops.registry import backend


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tests", default="tg16,tg16x8,pp512")
    parser.add_argument("--layers", default="", help="by default none, one, half and all")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream-from", type=int, help="rows from which experts are copied to the device; else measured")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    deadline = time.perf_counter() + args.seconds
    tests, notes = [test_named(name) for name in args.tests.split(",")], Notes(args.out)
    device, host = backend("triton"), computing_parts(backend("cpu"))
    assert isinstance(device, HostsExperts)
    for name in args.models:
        with GGUFFile.open([synthetic(name, args.folder)]) as file:
            source = Source.of(file, max(t.length for t in tests))
            layers = list(expert_refs(source.program))
            every = sorted({0, 1, len(layers) // 2, len(layers)})
            plain: Array | None = None
            for count in map(int, args.layers.split(",")) if args.layers else every:
                if time.perf_counter() > deadline:
                    return 0
                chosen = HostExperts(host, frozenset(layers[:count]), True, args.stream_from) if count else None
                device.leave_to_host(chosen)
                subject = Subject(source, device, limits_for(tests, args.step_tokens, False), "auto")
                row, plain = figures(subject, tests, args.rounds, plain, deadline)
                how = sorted({t.implementation for t in subject.step.explain() if "host memory" in t.implementation})
                notes.say(model=name, host_layers=count, load_s=round(subject.load_seconds, 2), **row, how=how)
                subject.close()
    return 0


def figures(
    subject: Subject, tests: list[Test], rounds: int, plain: Array | None, deadline: float
) -> tuple[dict[str, Any], Array]:
    """Tokens a second, and how far logits lie from those with all experts on the device."""
    inputs = next(iter(subject.layout.prefill(0, 16, 1)))
    logits = subject.step(inputs, "logits").logits
    assert logits is not None
    row: dict[str, Any] = {"error": None if plain is None else float(f"{rel_error(logits, plain):.2e}")}
    run(subject, [inputs])
    for test in tests:
        seconds = measure(subject, test, rounds, deadline).seconds
        row[test.name] = round(test.work / median(seconds), 1)
    return row, logits if plain is None else plain


if __name__ == "__main__":
    sys.exit(main())
