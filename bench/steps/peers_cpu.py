"""Quarrel beside llama.cpp on this CPU: the same files, the same threads, in turns within one run.

    python -m bench.steps.peers_cpu MODEL ... --llama-bench PROGRAM --out FILE.jsonl [--rounds 3] [--threads N]
        [--prompts 32,128,512,2048] [--tokens 32] [--depths 0,4096,16384] [--batches 2,4,8,32] [--batched-bench PROGRAM]

MODEL is a file, or SHAPE:QUANT or SHAPE:QUANT:LAYERS for one of random weights. Each round asks both programs for every
test, one after another; the medians of the rounds count, and their ends are kept. llama-bench has no batches: they are left
out without `--batched-bench` (llama-batched-bench). The read bandwidth is measured beside ours, in each round. One line of
JSON for each model and test; then a Markdown table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.shared import FOLDER, Notes, command_line, synthetic

Speeds = dict[str, float]
"""Tokens a second by the name of a test."""
PROMPT_BEFORE = 128
"""Tokens of each sequence before a batch decodes."""


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--llama-bench", required=True, metavar="PROGRAM")
    parser.add_argument("--batched-bench", metavar="PROGRAM")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=FOLDER / "peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", default="32,128,512,2048")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--depths", default="0,4096,16384")
    parser.add_argument("--batches", default="2,4,8,32")
    args = parser.parse_args()
    notes, rows = Notes(args.out), []
    for name in args.models:
        for row in compared(name, args):
            notes.say(model=name, threads=args.threads, rounds=args.rounds, **row)
            rows.append({"model": name} | row)
    print(table(rows))
    return 0


def compared(name: str, args: Any) -> Iterator[dict[str, Any]]:
    """A row for each test of a model."""
    path = synthetic(name, args.folder)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(args.rounds):
        for side, speeds in (("ours", ours(path, args)), ("theirs", theirs(path, args))):
            for test, speed in speeds.items():
                found[test][side].append(speed)
    for test, sides in list(found.items()):
        if not {"ours", "theirs"} <= sides.keys():
            continue
        row = {side: summary(values) for side, values in sides.items()}
        share = found[f"{test} share"]["ours"]
        row |= {"share": round(median(share), 3)} if share else {}
        yield {"test": test, **row, "ratio": round(row["ours"]["median"] / row["theirs"]["median"], 3)}


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "least": round(min(values), 3), "most": round(max(values), 3)}


def ours(path: Path, args: Any) -> Speeds:
    """From the command that a user runs; `TEST share` is the share of the read bandwidth at which a step read its bytes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "quarrel.bench", "-m", str(path), "--backend", "cpu", "-r", "1", "--no-check"]
        command += ["--threads", str(args.threads), "-p", args.prompts, "-n", str(args.tokens), "-d", args.depths]
        command += ["-b", args.batches, "--prompt-length", str(PROMPT_BEFORE)] if args.batched_bench else []
        subprocess.run([*command, "--out", file.name], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        figures = json.loads(Path(file.name).read_text())["figures"]
    speeds = {f["test"]: f["speed"] for f in figures}
    return speeds | {f"{f['test']} share": f["share"] for f in figures if f["share"]}


def theirs(path: Path, args: Any) -> Speeds:
    command = [args.llama_bench, "-m", str(path), "-t", str(args.threads), "-r", "1", "-o", "jsonl"]
    command += ["-p", args.prompts, "-n", str(args.tokens), "-d", args.depths]
    speeds = {}
    for row in lines(command):
        kind = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
        speeds[kind + (f" @ d{row['n_depth']}" if row["n_depth"] else "")] = row["avg_ts"]
    if args.batched_bench:
        most = max(map(int, args.batches.split(",")))
        command = [args.batched_bench, "-m", str(path), "-t", str(args.threads), "-npp", str(PROMPT_BEFORE)]
        command += ["-ntg", str(args.tokens), "-npl", args.batches, "-c", str(most * (PROMPT_BEFORE + args.tokens))]
        for row in lines([*command, "--output-format", "jsonl"]):
            speeds[f"tg{row['tg']} x{row['pl']} @ d{PROMPT_BEFORE}"] = row["speed_tg"]
    return speeds


def lines(command: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The JSON lines that a program prints."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


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
