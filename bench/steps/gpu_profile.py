"""Where a step's time goes on one GPU: the share of each kernel, by the profiler, in decode steps and in a long prompt.

    python -m bench.steps.gpu_profile granite-4-h-tiny:Q4_K_M:12 model.gguf [--tests tg16,tg16x8,pp4096] --out FILE.json

A model is a GGUF file, or SHAPE:QUANT:LAYERS of `tools/make_synthetic.py`: a few layers of a large model, as long as they
outgrow the device's cache, show the same as all. Several processes compile the kernels first. Prints a line for each
kernel, the slowest first. A kernel that starts before the previous one has ended waits on the profiler's clock, so the sum
of all kernels can exceed the step's own time.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.shared import FOLDER, command_line, synthetic, test_named
from quarrel.bench.measure import run
from quarrel.bench.precompile import jobs_for, precompile
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test
from quarrel.gguf import GGUFFile
from quarrel.ops.registry import backend


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tests", default="tg16,tg16x8,tg16x32,pp4096")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--top", type=int, default=14)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.perf_counter()
    tests = [test_named(name) for name in args.tests.split(",")]
    files = [synthetic(name, args.folder) for name in args.models]
    print(f"[{time.perf_counter() - began:.1f} s] files written", flush=True)
    chosen = backend(args.backend)
    if args.jobs > 1:
        shares = [
            job for f in files for job in jobs_for(str(f), args.backend, args.compute, chosen.step_tokens, tests, False, 8)
        ]
        precompile(shares, args.jobs, args.seconds * 0.5)
    rows: list[dict[str, Any]] = []
    for name, path in zip(args.models, files, strict=True):
        try:
            with GGUFFile.open([path]) as file:
                source = Source.of(file, max(t.length for t in tests))
                subject = Subject(source, chosen, limits_for(tests, chosen.step_tokens, False), args.compute)
                for test in tests:
                    if time.perf_counter() - began > args.seconds:
                        print("the time is over")
                        return 0
                    print(f"[{time.perf_counter() - began:.1f} s] {name} {test.name}", flush=True)
                    rows.append({"model": name, "test": test.name, **profiled(subject, test, args.top)})
                    args.out.write_text(json.dumps(rows))
                subject.close()
        except Exception:
            print(f"{name} FAILED: {traceback.format_exc(limit=-8)}", flush=True)
    return 0


def profiled(subject: Subject, test: Test, top: int) -> dict[str, Any]:
    """Microseconds a step by kernel, and the step's own time without the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    layout = subject.layout

    def steps() -> None:
        if test.kind == "prefill":
            run(subject, layout.prefill(test.depth, test.tokens, test.batch))
        else:
            run(subject, (layout.decode(test.depth + i, test.batch, from_last=i > 0) for i in range(test.tokens)))

    if test.depth:
        run(subject, layout.prefill(0, test.depth, test.batch))
    for _ in range(3):
        steps()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        steps()
        times.append(time.perf_counter() - began)
    count = 1 if test.kind == "prefill" else test.tokens
    clock = 1e6 * sorted(times)[1] / count
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        steps()
        if cuda:
            torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        time_us = event.device_time if cuda else event.cpu_time
        if not cuda or event.device_type.name == "CUDA":
            spent[event.name].append(time_us)
    order = sorted(spent.items(), key=lambda item: -sum(item[1]))
    every = sum(map(sum, spent.values())) / count
    launches = sum(map(len, spent.values())) / count
    print(f"  a step takes {clock:.1f} us by the clock; kernels {every:.1f} us in {launches:.0f} launches")
    kernels = {}
    for name, each in order[:top]:
        sizes = sorted(each)
        middle = [round(sizes[int(q * (len(sizes) - 1))], 1) for q in (0.0, 0.5, 1.0)]
        kernels[name[:60]] = [round(sum(each) / count, 2), round(len(each) / count, 1), middle]
        share = 100 * sum(each) / count / every
        print(f"  {sum(each) / count:10.1f} us {share:5.1f}% {len(each) / count:6.1f} x  {middle}  {name[:60]}", flush=True)
    return {"clock_us": round(clock, 2), "kernels_us": round(every, 2), "launches": launches, "kernels": kernels}


if __name__ == "__main__":
    sys.exit(main())
