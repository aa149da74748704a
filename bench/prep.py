"""Trials of other kernels in the real step: built beside the present ones, interleaved, and one table of what wins.

    python bench/prep.py --out prep.jsonl [--seconds 200] [--parts 128,64] [--layers 8] [--jobs 14] [--list]

Each trial is the backend with a few of its names replaced while a model is built and run. A model of so many layers is
made, every trial of it is loaded, its logits are compared with the first one's (the backend as it is), and all are timed
in turns, medians of 5. A line of JSON each as it comes, so a run that is cut off keeps what it had.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from notes import Notes

from quarrel.bench.measure import run as run_steps
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.work import Test
from quarrel.gguf import GGUFFile
from quarrel.ops.registry import backend
from quarrel.triton_backend import many_rows

ROOT = Path(__file__).resolve().parents[1]
BEGAN = time.perf_counter()
ROUNDS = 5
Patch = Callable[[], AbstractContextManager[None]]


@contextmanager
def replaced(*given: tuple[Any, str, Any]) -> Iterator[None]:
    """Other values for names of modules, for a while."""
    before = [(where, name, getattr(where, name)) for where, name, _ in given]
    for where, name, value in given:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in reversed(before):
            setattr(where, name, value)


def given(where: Any, name: str, value: Any) -> Patch:
    return lambda: replaced((where, name, value))


@dataclass(frozen=True)
class Trial:
    name: str
    patch: Patch = nullcontext


@dataclass(frozen=True)
class Group:
    """Trials of one model and test; `bar` is of the whole model, of so many `layers`."""

    name: str
    shape: str
    quant: str
    test: Test
    layers: int
    bar: float
    trials: tuple[Trial, ...]

    def file(self, folder: Path, cut: int) -> Path:
        return folder / f"{self.shape}-{self.quant}-{cut}.gguf"


def groups() -> list[Group]:
    tiles = Trial("tiles of matmul.py", given(many_rows, "takes", lambda site, weights: False))
    small = Trial("small maps by warpgroups too", given(many_rows, "_SMALL", 0))
    mistral, now = "mistral-7b", Trial("now")
    return [
        Group("128", mistral, "Q4_K_M", Test("decode", 32, 176, 128), 32, 12000, (now, tiles, small)),
        Group("64", mistral, "Q4_K_M", Test("decode", 32, 176, 64), 32, 9000, (now, tiles, small)),
        Group("32", mistral, "Q4_K_M", Test("decode", 32, 176, 32), 32, 6000, (now,)),
        Group("128 Q8_0", mistral, "Q8_0", Test("decode", 32, 176, 128), 32, 12000, (now, tiles)),
    ]


Job = tuple[str, str, int]
"""File, group and place of a trial."""


def compiled(job: Job) -> tuple[Job, str]:
    """Fills Triton's cache in a worker and runs what it made; what went wrong."""
    path, name, place = job
    try:
        group = next(g for g in groups() if g.name == name)
        with GGUFFile.open([path]) as file, group.trials[place].patch():
            steps(Source.of(file, group.test.length).cut()[0], group.test, place == 0)
    except Exception:
        return job, f"{job}: {traceback.format_exc(limit=-4)}"[-1500:]
    return job, ""


def steps(source: Source, test: Test, prompt: bool) -> None:
    """The prompt, which no trial changes, and both ends of the keys, plain and as a graph."""
    subject = built(source, test)
    layout = subject.layout
    if test.depth and prompt:
        run_steps(subject, layout.prefill(0, test.depth, test.batch))
    for at in (test.depth, test.depth + test.tokens - 1):
        run_steps(subject, (layout.decode(at, test.batch, i > 0) for i in range(2)))
    subject.step(layout.decode(test.depth, test.batch, False), "logits")
    subject.close()


def built(source: Source, test: Test) -> Subject:
    engine = backend("triton")
    return Subject(source, engine, limits_for([test], engine.step_tokens, False), "auto")


def warm(jobs: list[Job], processes: int, until: float, notes: Notes) -> set[str]:
    """The jobs that failed or were not done in time: nothing of theirs is run here, where a fault would end it all."""
    context = multiprocessing.get_context("spawn")
    left = {str(job) for job in jobs}
    with context.Pool(min(processes, len(jobs)), maxtasksperchild=1) as pool:
        waiting = pool.imap_unordered(compiled, jobs)
        try:
            for _ in jobs:
                job, fault = waiting.next(max(0.1, until - time.perf_counter()))
                if fault:
                    notes.say(part="compile", fault=fault)
                else:
                    left.discard(str(job))
        except multiprocessing.TimeoutError:
            notes.say(part="compile", fault="the time was over", left=sorted(left))
        pool.terminate()
    return left


def logits_of(subject: Subject, test: Test) -> np.ndarray:
    layout = subject.layout
    for _ in range(2):  # plain, then the graph
        out = subject.step(layout.decode(test.depth, test.batch, False), "logits").logits
    assert out is not None
    return out


def trials(group: Group, path: Path, cut: int, notes: Notes, until: float, bad: set[str]) -> list[dict[str, Any]]:
    """All trials of a group in turns."""
    test, rows = group.test, list[dict[str, Any]]()
    live: list[tuple[Trial, Subject, dict[str, Any]]] = []
    want: np.ndarray | None = None
    with GGUFFile.open([str(path)]) as file:
        for place, trial in enumerate(group.trials):
            if str((str(path), group.name, place)) in bad:
                continue
            row: dict[str, Any] = {"part": group.name, "trial": trial.name, "layers": cut, "seconds": []}
            if time.perf_counter() > until:
                break
            try:
                with trial.patch():
                    subject = built(Source.of(file, test.length), test)
                    if test.depth:
                        run_steps(subject, subject.layout.prefill(0, test.depth, test.batch))
                    got = logits_of(subject, test)
                    want = got if want is None else want
                    row["off"] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
                    row["same_best"] = float((got.argmax(-1) == want.argmax(-1)).mean())
                    drawn = subject.step(subject.layout.decode(test.depth, test.batch, False), "tokens").tokens
                    row["tokens_right"] = bool((drawn == got.argmax(-1)).all())
                    for _ in range(2):
                        once(subject, test)
                live.append((trial, subject, row))
                rows.append(row)
            except Exception as failure:
                notes.say(**row | {"raised": f"{type(failure).__name__}: {failure}"[:600]})
                if want is None:
                    return rows  # without the first there is nothing to compare with
        for i in range(ROUNDS):
            for trial, subject, row in live[:: 1 if i % 2 == 0 else -1]:
                if time.perf_counter() > until and i:
                    continue
                with trial.patch():
                    began = time.perf_counter()
                    once(subject, test)
                    row["seconds"].append((time.perf_counter() - began) / test.tokens)
        for _, subject, row in live:
            taken = row.pop("seconds")
            if taken:
                row |= {"ms": round(median(taken) * 1e3, 4), "spread": round(max(taken) / min(taken) - 1, 4)}
                row["rounds"] = len(taken)
            notes.say(**row)
            subject.close()
    return rows


def once(subject: Subject, test: Test) -> None:
    layout = subject.layout
    run_steps(subject, (layout.decode(test.depth + i, test.batch, from_last=i > 0) for i in range(test.tokens)))


def projected(group: Group, cut: int, rows: list[dict[str, Any]], fixed: float) -> str:
    """A table; `fixed` are milliseconds of a step that do not depend on its layers."""
    lines = [
        f"\n{group.name}: {group.shape} {group.quant}, {group.test.name}, {cut} of {group.layers} layers, bar {group.bar:g}"
    ]
    lines.append(f"{'trial':52s} {'ms':>8s} {'us/layer':>9s} {'against now':>11s} {'whole tok/s':>11s} {'off':>8s}  bar")
    first = next((r for r in rows if "ms" in r), None)
    for row in rows:
        if first is None or "ms" not in row:
            continue
        layer = (row["ms"] - fixed) / cut
        whole = group.test.batch / (fixed + layer * group.layers) * 1e3
        met = "met" if whole >= group.bar else "missed"
        right = "" if row["off"] < 2e-2 and row["tokens_right"] else "  WRONG?"
        lines.append(
            f"{row['trial']:52s} {row['ms']:8.4f} {layer * 1e3:9.2f} {row['ms'] / first['ms'] - 1:+11.2%} {whole:11.1f}"
            f" {row['off']:8.1e}  {met}{right}"
        )
    return "\n".join(lines)


def make(group: Group, cut: int, folder: Path) -> Path:
    path = group.file(folder, cut)
    if not path.exists():
        layers = [] if cut == group.layers else ["--layers", str(cut)]
        command = [sys.executable, "-m", "tools.make_synthetic", group.shape, group.quant, str(path), *layers]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("prep.jsonl"))
    parser.add_argument("--parts", default="128,64,32,128 Q8_0")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--layers", type=int, default=8, help="of Mistral-7B")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--list", action="store_true", help="print what would be done")
    args = parser.parse_args()
    parts, until = args.parts.split(","), BEGAN + args.seconds
    chosen = [g for g in groups() if g.name in parts]
    cuts = {g.name: args.layers for g in chosen}
    if args.list:
        for group in chosen:
            for trial in group.trials:
                print(group.name, trial.name)
        return 0
    notes = Notes(args.out, BEGAN)
    paths = {g.name: make(g, cuts[g.name], args.folder) for g in chosen}
    for group in chosen:
        make(group, args.layers // 2, args.folder)
    models = [[(str(paths[g.name]), g.name, i) for i in range(len(g.trials))] for g in chosen]
    # What trials share is compiled by the first of each model.
    first: list[Job] = [job for jobs in models for job in jobs[:1]]
    then: list[Job] = [job for jobs in models for job in jobs[1:]]
    notes.say(part="files", made=[str(p) for p in paths.values()], jobs=[len(first), len(then)])
    bad: set[str] = set()
    if args.jobs > 1:
        bad = warm(first, args.jobs, BEGAN + args.seconds * 0.45, notes)
        bad |= warm(then, args.jobs, BEGAN + args.seconds * 0.68, notes)
        notes.say(part="compile", bad=sorted(bad))
    notes.say(part="machine", device=backend("triton").device(), torch=torch.__version__)
    tables = []
    for group in (g for g in groups() if g.name in parts):
        cut = cuts[group.name]
        try:
            rows = trials(group, paths[group.name], cut, notes, until, bad)
            fixed = 0.0
            if rows and "ms" in rows[0]:
                half = replace(group, name=f"{group.name}, half", trials=group.trials[:1])
                short = trials(half, group.file(args.folder, args.layers // 2), args.layers // 2, notes, until + 8, set())
                if short and "ms" in short[0]:
                    fixed = max(0.0, 2 * short[0]["ms"] - rows[0]["ms"])
            tables.append(projected(group, cut, rows, fixed))
        except Exception:
            tables.append(f"{group.name} FAILED: {traceback.format_exc(limit=-6)}")
        print(tables[-1], flush=True)
    print("\n".join(["", "==== all tables", *tables]))
    notes.say(part="end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
