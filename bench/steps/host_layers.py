"""Layers on the host: tokens a second of a model whose first layers the CPU computes and the rest a GPU.

    python -m bench.steps.host_layers mistral-7b:Q4_K_M mixtral-8x7b:Q4_K_M --out FILE.jsonl [--layers 0,16] [--seconds 400]
        [--pieces 4,1] [--llama-bench PROGRAM]

A model is a file, or SHAPE:QUANT or SHAPE:QUANT:LAYERS of `tools/make_synthetic.py`. A line of JSON for each number of
layers on the host (by default none, half and all, of which the output stays on the GPU), with one sequence, several, and a
prompt. `bound` are the tokens a second that the host's read bandwidth, measured here, allows for the bytes of its layers,
`share` what tg32 came to of it, `error` that of the logits beside those of the whole GPU. `--pieces`: micro-batches of a
long step, each in turn. `--llama-bench` runs a llama.cpp that was built for this GPU with as many layers (-ngl) beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.shared import FOLDER, Notes, command_line, synthetic, test_named
from quarrel.bench.bandwidth import read_bandwidth
from quarrel.bench.machine import machine
from quarrel.bench.measure import measure
from quarrel.bench.precompile import jobs_for, precompile
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.workload import Test
from quarrel.gguf import GGUFFile
from quarrel.models.stages import borders, two_stages
from quarrel.ops.contract import Array, rel_error
from quarrel.ops.program import Program
from quarrel.ops.registry import backend
from quarrel.ops.step import Backend, ComputeChoice, Limits, WeightSource
from quarrel.ops.traffic import Traffic
from quarrel.parallel.host_layers import HostLayersStep, compile_stages


@dataclass
class Divided:
    """A backend that leaves the first layers to the host."""

    backend: Backend
    host: Backend
    layers: int

    @property
    def name(self) -> str:
        return self.backend.name

    def compile(
        self,
        program: Program,
        weights: WeightSource,
        limits: Limits,
        compute: ComputeChoice = "auto",
        progress: Callable[[int, int], None] | None = None,
    ) -> HostLayersStep:
        return compile_stages(two_stages(program, self.layers), self.host, self.backend, weights, limits, compute, progress)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tests", default="tg32,tg16x8,tg16x32,pp512,pp2048")
    parser.add_argument("--layers", default="", help="on the host; by default none, half and all")
    parser.add_argument("--pieces", default="4,1")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--seconds", type=float, default=400.0, help="nothing further begins after this")
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile kernels before; 1 for none")
    parser.add_argument("--llama-bench", metavar="PROGRAM")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    deadline = time.perf_counter() + args.seconds
    tests, notes = [test_named(name) for name in args.tests.split(",")], Notes(args.out)
    device, host = backend(args.backend), backend("cpu", args.threads)
    if hasattr(device, "ahead"):
        device.ahead = False  # processes that compile would stand in the way of what is timed
    paths = {name: synthetic(name, args.folder) for name in args.models}
    if args.jobs > 1 and args.backend == "triton":
        shapes = [*tests, Test("prefill", 128)]  # of a micro-batch
        jobs = [
            job
            for path in paths.values()
            for job in jobs_for(str(path), args.backend, "auto", args.step_tokens, shapes, False, args.jobs)
        ]
        notes.say(compiled_s=round(precompile(jobs, args.jobs, args.seconds / 3), 1))
    speed, _ = read_bandwidth(host)
    notes.say(device=device.device(), host=host.device(), machine=machine(), host_read_gb_s=round(speed / 1e9, 1))
    for name, path in paths.items():
        with GGUFFile.open([path]) as file:
            source = Source.of(file, max(t.length for t in tests))
            allowed = [0, *borders(source.program)]
            plain: Array | None = None
            for count in map(int, args.layers.split(",")) if args.layers else (0, allowed[len(allowed) // 2], allowed[-1]):
                if time.perf_counter() > deadline:
                    return 0
                each = args.pieces.split(",") if count else ["1"]
                used = Divided(device, host, count) if count else device
                subject = Subject(source, used, limits_for(tests, args.step_tokens, False), "auto")  # type: ignore[arg-type]
                row = {"model": name, "host_layers": count, "layers": allowed[-1], "load_s": round(subject.load_seconds, 2)}
                row |= bytes_of(subject, source.program, count, speed)
                inputs = next(iter(subject.layout.prefill(0, 16, 1)))
                logits = subject.step(inputs, "logits").logits
                assert logits is not None
                plain = logits if plain is None else plain
                row["error"] = float(f"{rel_error(logits, plain):.2e}")
                for i, pieces in enumerate(each):
                    if isinstance(subject.step, HostLayersStep):
                        subject.step.pieces = int(pieces)
                    # Only a long step has more than one.
                    some = tests if i == 0 else [t for t in tests if t.kind == "prefill"]
                    found = speeds(subject, some, args.rounds, deadline)
                    share = {"share": round(found["tg32"] / row["bound"], 3)} if "bound" in row and "tg32" in found else {}
                    notes.say(**row, pieces=int(pieces), **found, **share)
                subject.close()
        if args.llama_bench:
            for count in (0, allowed[len(allowed) // 2]):
                notes.say(
                    model=name, host_layers=count, engine="llama.cpp", **theirs(args.llama_bench, path, allowed[-1] - count)
                )
    return 0


def bytes_of(subject: Subject, program: Program, count: int, speed: float) -> dict[str, Any]:
    """Bytes of weights on both sides, and how many tokens a second the host's bandwidth allows, in bytes a second."""
    step = subject.step
    row: dict[str, Any] = {"device_gb": round(step.memory().weights / 1e9, 3)}
    if isinstance(step, HostLayersStep):
        traffic = Traffic.of(two_stages(program, count)[0], step.first.compute)
        read = traffic.step(1, 16)
        row |= {"host_gb": round(step.first.memory().weights / 1e9, 3), "host_read_gb": round(read / 1e9, 3)}
        row["bound"] = round(speed / read, 2)
    return row


def speeds(subject: Subject, tests: list[Test], rounds: int, deadline: float) -> dict[str, float]:
    """Tokens a second by test."""
    found = {}
    for test in tests:
        seconds = measure(subject, test, rounds, deadline).seconds
        found[test.name.partition(" @")[0].replace(" x", "x")] = round(test.work / median(seconds), 1)
    return found


def theirs(program: str, path: Path, layers: int) -> dict[str, float]:
    """Tokens a second of llama-bench with so many layers on the GPU; the output counts as one of them."""
    command = [program, "-m", str(path), "-ngl", str(layers + 1), "-p", "512,2048", "-n", "32", "-r", "2", "-o", "jsonl"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}": round(r["avg_ts"], 1) for r in rows}


if __name__ == "__main__":
    sys.exit(main())
