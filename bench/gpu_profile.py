"""Where a step's time goes on one GPU: each kernel's share, from the profiler, of decode steps and of a long prompt.

    python bench/gpu_profile.py granite-4-h-tiny:Q4_K_M:12 gpt-oss-20b:MXFP4:8 [--tests tg32,tg32x8,pp4096] --out FILE.json

A model is SHAPE:QUANT:LAYERS of `tools/make_synthetic.py`; a few layers of a large one, which outgrow the device's cache,
tell the same as all. Kernels are compiled by several processes first; a line for each kernel, the slowest first.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quarrel.bench.inputs import Layout  # noqa: E402
from quarrel.bench.measure import run  # noqa: E402
from quarrel.bench.subject import Source, Subject, limits_for  # noqa: E402
from quarrel.bench.warm import jobs_for, warm  # noqa: E402
from quarrel.bench.work import Test  # noqa: E402
from quarrel.gguf import GGUFFile  # noqa: E402
from quarrel.ops.registry import backend  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tests", default="tg16,tg16x8,tg16x32,pp4096")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--top", type=int, default=14)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.perf_counter()
    tests = [test_named(name) for name in args.tests.split(",")]
    args.folder.mkdir(parents=True, exist_ok=True)
    files = [made(name, args.folder) for name in args.models]
    print(f"[{time.perf_counter() - began:.1f} s] files written", flush=True)
    chosen = backend(args.backend)
    if args.jobs > 1:
        shares = [
            job for f in files for job in jobs_for(str(f), args.backend, args.compute, chosen.step_tokens, tests, False, 8)
        ]
        warm(shares, args.jobs, args.seconds * 0.5)
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
    """Microseconds a step by kernel, and the step's own by the clock without the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    layout: Layout = subject.layout

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


def test_named(name: str) -> Test:
    """`pp4096`, `tg16`, or `tg16x8` for eight sequences of 128 tokens each."""
    found = re.fullmatch(r"(pp|tg)(\d+)(?:x(\d+))?", name)
    if found is None:
        raise SystemExit(f"a test is called {name!r}: wanted pp4096, tg16 or tg16x8")
    if found[1] == "pp":
        return Test("prefill", int(found[2]))
    batch = int(found[3] or 1)
    return Test("decode", int(found[2]), 128 if batch > 1 else 0, batch)


def made(name: str, folder: Path) -> Path:
    shape, quant, layers = name.split(":")
    path = folder / f"{shape}-{quant}-{layers}.gguf"
    if not path.exists():
        command = [sys.executable, "-m", "tools.make_synthetic", shape, quant, str(path), "--layers", layers]
        subprocess.run(command, cwd=ROOT, check=True)
    return path


if __name__ == "__main__":
    sys.exit(main())
