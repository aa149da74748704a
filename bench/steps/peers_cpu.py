"""Quarrel beside llama.cpp on this CPU: the same files, the same threads, in turns within one run.

    python -m bench.steps.peers_cpu MODEL ... --llama-bench PROGRAM --out FILE.jsonl [--rounds 3] [--threads N]
        [--prompts 32,128,512,2048] [--tokens 32] [--batches 2,4,8,32] [--before 128] [--batched-bench PROGRAM]
        [--at-once N] [--seconds S]

MODEL is a file, or SHAPE:QUANT or SHAPE:QUANT:LAYERS for one of random weights; `MODEL@0,4096,16384` only decodes, behind
so many tokens. `table` stands for the files of TABLE, the most wanted first. Each round asks both programs for every test,
one after another; the medians of the rounds count, and their ends are kept. llama-bench has no batches: they are left out
without `--batched-bench` (llama-batched-bench). The read bandwidth is measured beside ours, in each round.

`--at-once N` compares N models at the same time, each on so many physical cores of its own as it has threads: `cpus` of a
row. They share the memory, so the bandwidth of a row is what its cores had of it. No model, and no further round of one, is
begun behind `--seconds`. One line of JSON for each model and test, when the model is done; then a Markdown table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.shared import FOLDER, ROOT, Notes, command_line, synthetic_command
from quarrel.bench.machine import machine
from quarrel.cpu_backend.runtime.features import allowed_cores, host_features, siblings

Speeds = dict[str, float]
"""Tokens a second by the name of a test."""
FORMATS = ["F16", "BF16", "F32", "Q3_K_S", "IQ4_XS", "Q2_K_S", "Q8_0", "Q6_K", "Q5_K_S", "Q4_K_S", "Q4_0"]
TABLE = [
    "gpt-oss-20b:MXFP4:2",
    *(f"tinyllama-1.1b:{name}:6" for name in FORMATS),
    *(f"smollm2-135m:{name}" for name in ("F16", "BF16", "F32", "Q8_0", "Q4_0", "Q4_K_M")),
    "mistral-7b:Q4_K_M:1@0,4096,16384",
    "llama-8b:Q8_0:1@0,4096,16384",
    "mixtral-8x7b:Q4_K_M:1",
    "granite-4-h-tiny:Q4_K_M:8",
    *(f"mistral-7b:{name}:1" for name in FORMATS),
    "gpt-oss-20b:MXFP4:2@0,4096,16384",
]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--llama-bench", type=Path, required=True, metavar="PROGRAM")
    parser.add_argument("--batched-bench", type=Path, metavar="PROGRAM")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--folder", type=Path, default=FOLDER / "peers", help="for files of random weights, until they are measured"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", default="32,128,512,2048")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batches", default="2,4,8,32")
    parser.add_argument("--before", type=int, default=128, help="tokens of each sequence before a batch decodes")
    parser.add_argument("--at-once", type=int, default=1, metavar="N")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S")
    args = parser.parse_args()
    args.until = time.perf_counter() + args.seconds
    places = cores(args.threads, args.at_once)
    notes = Notes(args.out)
    notes.say(**machine(), features=sorted(host_features()), threads=args.threads, places=places, command=sys.argv[1:])
    waiting = iter([name for model in args.models for name in (TABLE if model == "table" else [model])])
    rows: list[dict[str, Any]] = []
    lock = threading.Lock()

    def work(cpus: str) -> None:
        while time.perf_counter() < args.until:
            with lock:
                name = next(waiting, None)
            if name is None:
                return
            try:
                found = list(compared(Job(name, cpus, args)))
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                found = [{"test": "none", "failed": f"{error} {getattr(error, 'stderr', '') or ''}"[-600:]}]
            with lock:
                for row in found:
                    notes.say(model=name, cpus=cpus, **row)
                    rows.extend([{"model": name} | row] if "ratio" in row else [])

    with ThreadPoolExecutor(len(places)) as pool:
        list(pool.map(work, places))
    print(table(rows))
    return 0


def cores(threads: int, places: int) -> list[str]:
    """CPUs for each comparison, the first hyper-thread of neighbouring cores; one comparison has all that there are."""
    allowed = allowed_cores()
    if places == 1:
        return [",".join(map(str, allowed))]
    first = sorted({siblings(cpu): cpu for cpu in reversed(allowed)}.values())
    if len(first) < threads * places:
        raise SystemExit(
            f"{places} comparisons of {threads} threads need {threads * places} cores, and there are {len(first)}"
        )
    return [",".join(map(str, first[i : i + threads])) for i in range(0, threads * places, threads)]


@dataclass(frozen=True)
class Job:
    """A model's comparison, and where it runs."""

    name: str
    cpus: str
    args: Any

    @property
    def model(self) -> str:
        return self.name.partition("@")[0]

    @property
    def depths(self) -> str:
        """Tokens before what is decoded; without them there are prompts and batches too."""
        return self.name.partition("@")[2]

    def run(self, command: Sequence[str]) -> str:
        """What the command prints."""
        bound = ["taskset", "-c", self.cpus, *command]
        return subprocess.run(bound, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    def lines(self, command: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The JSON lines that a program prints."""
        for line in self.run(command).splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def compared(job: Job) -> Iterator[dict[str, Any]]:
    """A row for each test of a model."""
    place = job.cpus.replace(",", "-")  # llama-bench takes a comma for the end of a file's name
    path = job.args.folder / f"{job.model.replace(':', '-')}-{place}.gguf"
    if job.model.endswith(".gguf"):
        yield from measured(Path(job.model).resolve(), job)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        job.run([*synthetic_command(job.model, path), "--jobs", str(job.args.threads)])
        yield from measured(path, job)
    finally:
        path.unlink(missing_ok=True)


def measured(path: Path, job: Job) -> Iterator[dict[str, Any]]:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rounds in range(job.args.rounds):
        if rounds and time.perf_counter() > job.args.until:
            break
        for side, speeds in (("ours", ours(path, job)), ("theirs", theirs(path, job))):
            for test, speed in speeds.items():
                found[test][side].append(speed)
    for test, sides in list(found.items()):
        if not {"ours", "theirs"} <= sides.keys():
            continue
        row: dict[str, Any] = {side: summary(values) for side, values in sides.items()}
        for fact in ("share", "gb_s"):
            values = found[f"{test} {fact}"]["ours"]
            row |= {fact: round(median(values), 3)} if values else {}
        row["rounds"] = len(sides["ours"])
        yield {"test": test, **row, "ratio": round(row["ours"]["median"] / row["theirs"]["median"], 3)}


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "least": round(min(values), 3), "most": round(max(values), 3)}


def ours(path: Path, job: Job) -> Speeds:
    """From the command that a user runs; `TEST share` is the share of the read bandwidth, `TEST gb_s`, at which a step read
    its bytes."""
    args = job.args
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "quarrel.bench", "-m", str(path), "--backend", "cpu", "-r", "1", "--no-check"]
        command += ["--threads", str(args.threads), "-n", str(args.tokens), "--out", file.name]
        if job.depths:
            command += ["-p", "0", "-d", job.depths]
        else:
            command += ["-p", args.prompts]
            command += ["-b", args.batches, "--prompt-length", str(args.before)] if args.batched_bench else []
        job.run(command)
        figures = json.loads(Path(file.name).read_text())["figures"]
    speeds = {f["test"]: f["speed"] for f in figures}
    speeds |= {f"{f['test']} gb_s": f["read_gb_s"] for f in figures}
    return speeds | {f"{f['test']} share": f["share"] for f in figures if f["share"]}


def theirs(path: Path, job: Job) -> Speeds:
    args = job.args
    command = [
        str(args.llama_bench.resolve()),
        "-m",
        str(path),
        "-t",
        str(args.threads),
        "-r",
        "1",
        "-o",
        "jsonl",
        "-n",
        str(args.tokens),
    ]
    command += ["-p", "0", "-d", job.depths] if job.depths else ["-p", args.prompts]
    speeds = {}
    for row in job.lines(command):
        kind = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
        speeds[kind + (f" @ d{row['n_depth']}" if row["n_depth"] else "")] = row["avg_ts"]
    if args.batched_bench and not job.depths:
        most = max(map(int, args.batches.split(",")))
        command = [str(args.batched_bench.resolve()), "-m", str(path), "-t", str(args.threads), "-npp", str(args.before)]
        command += ["-ntg", str(args.tokens), "-npl", args.batches, "-c", str(most * (args.before + args.tokens))]
        for row in job.lines([*command, "--output-format", "jsonl"]):
            speeds[f"tg{row['tg']} x{row['pl']} @ d{args.before}"] = row["speed_tg"]
    return speeds


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For the docs."""
    out = ["| file | test | llama.cpp | Quarrel | ratio | of the bandwidth |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        left, right = row["theirs"]["median"], row["ours"]["median"]
        share = f"{row['share']:.0%}" if "share" in row else ""
        out.append(f"| {row['model']} | {row['test']} | {left:.1f} | {right:.1f} | {row['ratio']:.2f} | {share} |")
    return "\n".join(out)


if __name__ == "__main__":
    sys.exit(main())
