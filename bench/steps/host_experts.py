"""Experts in host memory: speed by the number of layers that keep them there, and with those used most on the GPU.

    python -m bench.steps.host_experts gpt-oss-20b:MXFP4:6 mixtral-8x7b:Q4_K_M:3 --out FILE.jsonl [--layers 0,1,3]

A model is SHAPE:QUANT:LAYERS of `tools/make_synthetic.py`. A line of JSON for each number of layers, and one with the most
used experts of all layers in `--share` of their bytes (`load(expert_memory=)`), once they have had `--settle` rounds of the
first test to come: the share of choices that found their expert on the GPU, and the bytes that moved. `error` is that of
the logits beside those with all experts on the GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.shared import FOLDER, Notes, command_line, synthetic, test_named
from quarrel.bench.measure import measure, run
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test
from quarrel.gguf import GGUFFile
from quarrel.llm.expert_memory import expert_pools
from quarrel.ops.contract import Array, rel_error
from quarrel.ops.host import HostExperts, HostsExperts, computing_parts, expert_refs
from quarrel.ops.registry import backend
from quarrel.ops.step import Step

if TYPE_CHECKING:
    from quarrel.triton_backend.experts.pool import Pool


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tests", default="tg16,tg16x8,pp512")
    parser.add_argument("--layers", default="", help="by default none, one, half and all")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts' bytes, for those used most; 0 for none")
    parser.add_argument("--settle", type=int, default=40)
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
            counts = [min(int(count), len(layers)) for count in args.layers.split(",")] if args.layers else every
            cases: list[tuple[dict[str, Any], HostExperts | None]] = [
                ({"host_layers": n}, HostExperts(host, frozenset(layers[:n]), True, args.stream_from) if n else None)
                for n in counts
            ]
            if args.share:
                refs = [ref for found in expert_refs(source.program).values() for ref in found]
                compute = device.compute_of("auto")
                memory = int(args.share * device.device_bytes(refs, compute))
                pools, taken = expert_pools(source.program, device, compute, memory)
                slots = {"expert_memory": taken, "slots": sum(pool.slots for pool in pools)}
                cases.append((slots, HostExperts(host, frozenset(layers), True, args.stream_from, pools)))
            for label, chosen in cases:
                if time.perf_counter() > deadline:
                    return 0
                device.leave_to_host(chosen)
                subject = Subject(source, device, limits_for(tests, args.step_tokens, False), "auto")
                pooled = pools_of(subject.step)
                if pooled:
                    measure(subject, tests[0], args.settle, deadline)
                row, plain = figures(subject, tests, args.rounds, plain, deadline, pooled)
                how = sorted({t.implementation for t in subject.step.explain() if "host memory" in t.implementation})
                notes.say(model=name, **label, load_s=round(subject.load_seconds, 2), **row, how=how)
                subject.close()
    return 0


def pools_of(step: Step) -> list[Pool]:
    """The pools of a step on CUDA."""
    from quarrel.triton_backend.experts.host import pools_of
    from quarrel.triton_backend.step import TritonStep

    assert isinstance(step, TritonStep)
    return pools_of(step._choices)


def figures(
    subject: Subject, tests: list[Test], rounds: int, plain: Array | None, deadline: float, pools: Sequence[Pool]
) -> tuple[dict[str, Any], Array]:
    """Tokens a second, and how far logits lie from those with all experts on the device; of pools, what was found there."""
    inputs = next(iter(subject.layout.prefill(0, 16, 1)))
    logits = subject.step(inputs, "logits").logits
    assert logits is not None
    row: dict[str, Any] = {"error": None if plain is None else float(f"{rel_error(logits, plain):.2e}")}
    run(subject, [inputs])
    for test in tests:
        before = [sum(getattr(pool, name) for pool in pools) for name in ("chosen", "found", "moved")]
        seconds = measure(subject, test, rounds, deadline).seconds
        row[test.name] = round(test.work / median(seconds), 1)
        if pools:
            after = [sum(getattr(pool, name) for pool in pools) for name in ("chosen", "found", "moved")]
            chosen, found, moved = (b - a for a, b in zip(before, after, strict=True))
            row |= {f"{test.name} found": round(found / max(1, chosen), 3), f"{test.name} moved": moved}
    return row, logits if plain is None else plain


if __name__ == "__main__":
    sys.exit(main())
