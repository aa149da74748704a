"""Experts in host memory beside a GPU: speed by how many layers leave them there, and whether the logits stay the same.

    python bench/host_experts.py gpt-oss-20b:MXFP4:6 mixtral-8x7b:Q4_K_M:3 --out FILE.jsonl [--layers 0,1,3]

A model is SHAPE:QUANT:LAYERS of `tools/make_synthetic.py`. A line of JSON for each number of layers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from gpu_profile import made, test_named  # noqa: E402

from quarrel.bench.measure import measure, run  # noqa: E402
from quarrel.bench.subject import Source, Subject, limits_for  # noqa: E402
from quarrel.bench.work import Test  # noqa: E402
from quarrel.gguf import GGUFFile  # noqa: E402
from quarrel.ops.contract import Array, rel_error  # noqa: E402
from quarrel.ops.host import HostExperts, HostsExperts, computing_parts, expert_refs  # noqa: E402
from quarrel.ops.registry import backend  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tests", default="tg16,tg16x8,pp512")
    parser.add_argument("--layers", default="", help="by default none, one, half and all")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream-from", type=int, help="rows from which experts are copied to the device; else measured")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.perf_counter() + args.seconds
    tests = [test_named(name) for name in args.tests.split(",")]
    device, host = backend("triton"), computing_parts(backend("cpu"))
    assert isinstance(device, HostsExperts)
    with args.out.open("a") as out:
        for name in args.models:
            with GGUFFile.open([made(name, args.folder)]) as file:
                source = Source.of(file, max(t.length for t in tests))
                paths = list(expert_refs(source.program))
                counts = (
                    sorted({0, 1, len(paths) // 2, len(paths)}) if not args.layers else map(int, args.layers.split(","))
                )
                plain: Array | None = None
                for count in counts:
                    if time.perf_counter() > deadline:
                        return 0
                    chosen = HostExperts(host, frozenset(paths[:count]), True, args.stream_from) if count else None
                    device.leave_to_host(chosen)
                    subject = Subject(source, device, limits_for(tests, args.step_tokens, False), "auto")
                    row, plain = figures(subject, tests, args.rounds, plain, deadline)
                    row = {"model": name, "host_layers": count, "load_s": round(subject.load_seconds, 2), **row}
                    told = {t.implementation for t in subject.step.explain() if "host memory" in t.implementation}
                    print(json.dumps(row | {"how": sorted(told)}), flush=True)
                    print(json.dumps(row), file=out, flush=True)
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
