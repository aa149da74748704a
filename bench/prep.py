"""Trials of other kernels in the real step: built beside the present ones, interleaved, and one table of what wins.

    python bench/prep.py --out prep.jsonl [--seconds 200] [--parts kernels,batch] [--layers 8] [--jobs 14] [--list]

Each trial is the backend with a few of its names replaced while a model is built and run. A model of so many layers is
made, every trial of it is loaded, its logits are compared with the first one's (the backend as it
is), and all are timed in turns, medians of 5. A line of JSON each as it comes, so a run that is cut off keeps what it had.
`kernels` times the maps of 128 rows alone first (graphs of weights that no cache holds), and the best go into `batch`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import triton_batch
import warpgroup_rows as wg

from quarrel.bench.measure import run as run_steps
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.work import Test
from quarrel.gguf import GGUFFile
from quarrel.ops.attention import ATTENTION, AttentionSpec
from quarrel.ops.compare import case_error
from quarrel.ops.contract import Case
from quarrel.ops.registry import backend
from quarrel.triton_backend import attention, inputs
from quarrel.triton_backend.runtime import cdiv, launch

ROOT = Path(__file__).resolve().parents[1]
BEGAN = time.perf_counter()
WRONG = 2e-3
"""Relative error that no map of these formats comes near."""
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


@contextmanager
def both(*patches: Patch) -> Iterator[None]:
    if not patches:
        yield
        return
    with patches[0](), both(*patches[1:]):
        yield


def splits(shortest: int, keys: int = 0, warps: int = 0) -> Patch:
    """Splits of at least so many keys; tiles of `keys` in so many warps."""

    def tiles(*given: Any) -> Any:
        one, many = before(*given)
        return replace(one, keys=keys or one.keys, warps=warps or one.warps), many

    before, function = attention.tiles, attention.splits_of
    most = (function.__defaults__ or ())[-1]
    return lambda: replaced(
        (attention, "LEAST_SPLIT", shortest), (inputs, "LEAST_SPLIT", shortest), (attention, "tiles", tiles),
        (function, "__defaults__", (shortest, most)),
    )  # fmt: skip


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


def groups(best: wg.Tiles) -> list[Group]:
    split, small, two = splits(256), splits(256, 32), splits(256, 64, 8)
    batch = (
        Trial("now"),
        Trial("splits of 256 keys", split),
        Trial("splits of 256 keys, tiles of 32", small),
        Trial("splits of 256 keys, tiles of 64, 8 warps", two),
        Trial("tiles of 32 keys", splits(128, 32)),
        Trial("wgmma", lambda: wg.lent(wg.Tiles())),
        Trial("wgmma, best tiles", lambda: wg.lent(best)),
        Trial("wgmma, best tiles; splits of 256 keys", lambda: both(lambda: wg.lent(best), split)),
        Trial("wgmma, best tiles; splits of 256 keys, tiles of 32", lambda: both(lambda: wg.lent(best), small)),
    )
    mistral = "mistral-7b"
    return [
        Group("batch", mistral, "Q4_K_M", Test("decode", 32, 176, 128), 32, 12000, batch),
    ]


SHAPES: dict[str, dict[str, Any]] = {
    "gated": {"formats": ("Q4_K", "Q4_K"), "n": 14336, "k": 4096},
    "down": {"formats": ("Q4_K",), "n": 4096, "k": 14336},
    "down Q6_K": {"formats": ("Q6_K",), "n": 4096, "k": 14336},
    "out": {"formats": ("Q4_K",), "n": 4096, "k": 4096},
    "head": {"formats": ("Q6_K",), "n": 32000, "k": 4096},
    "three": {"formats": ("Q4_K", "Q4_K", "Q6_K"), "ns": (4096, 1024, 1024), "k": 4096},
}
NOW = {"gated": 119.0, "down": 74.8, "down Q6_K": 77.8, "out": 25.5, "head": 131.7, "three": 38.4}
"""Microseconds of 128 rows by the tiles in force, as `bench/tune.py` had them (2026-11-21)."""


def candidates() -> Iterator[tuple[str, wg.Tile]]:
    """The most wanted first."""
    found = {
        "gated": ((128, 1, 4), (64, 1, 3), (128, 1, 6), (128, 1, 3)),
        "down": ((128, 4, 4), (64, 2, 3), (128, 4, 3), (64, 4, 3), (128, 3, 4), (128, 8, 3)),
        "down Q6_K": ((128, 4, 4), (64, 2, 3), (128, 4, 3), (64, 4, 3)),
        "three": ((128, 2, 4), (64, 1, 3), (64, 2, 3), (128, 4, 3)),
        "out": ((128, 4, 4), (64, 2, 3), (64, 4, 3), (128, 2, 4)),
        "head": ((128, 1, 3), (64, 1, 3), (128, 1, 4)),
    }
    for i in range(6):
        for name, tiles in found.items():
            if i < len(tiles):
                yield name, wg.Tile(*tiles[i])


def kernel(name: str, tile: wg.Tile, tokens: int, small: bool) -> tuple[Callable[[int], None], int, Callable[[], float]]:
    """Run turn i, number of turns, and the relative error."""
    what = SHAPES[name]
    k, formats = what["k"], what["formats"]
    ns = what.get("ns", (what.get("n"),) * len(formats))
    width = wg.width_of(tokens)
    device = triton_batch.device()
    sets = [triton_batch.turns(triton_batch.packed(f, n, k), small) for f, n in zip(formats, ns, strict=True)]
    if name == "gated":
        sets[1] = [*sets[1][1:], sets[1][0]]  # the same values from other addresses
    x = triton_batch.activations(tokens, k)
    there = torch.empty(width * k, device=device, dtype=torch.float16)
    launch(wg.arrange, (k // 128, width // 16), there, x, tokens, K=k, BT=width, PDL=False)
    count = sum(cdiv(n, tile.rows) for n in (ns if name == "three" else ns[:1]))
    part = torch.empty(max(1, 2 * tile.parts * count * tile.rows * width if tile.parts > 1 else 1), device=device)
    arrived = torch.zeros(count, dtype=torch.int32, device=device)
    add = name.startswith(("down", "out"))
    residual = torch.randn(tokens, ns[0], device=device) if add else None
    wide = torch.float32 if add or name == "head" else torch.float16
    outs = ns if name == "three" else ns[:1]
    ys = [torch.full((tokens, n), float("nan"), device=device, dtype=wide) for n in outs]

    def go(i: int) -> None:
        weights = [s[i] for s in sets]
        if name == "three":
            wg.run_three(launch, tile, width, ys, there, weights, part, arrived, tokens)
        else:
            kind = "silu" if name == "gated" else "none"
            wg.run_one(launch, tile, width, ys[0], there, weights, residual, part, arrived, tokens, 0.5, kind)

    def error() -> float:
        sums = [x.float() @ triton_batch.exact(f, n, k).T for f, n in zip(formats, ns, strict=True)]
        if name == "gated":
            sums = [torch.nn.functional.silu(sums[0]) * sums[1]]
        if residual is not None:
            sums = [residual + 0.5 * sums[0]]
        return max(triton_batch.relative(y.float(), s) for y, s in zip(ys, sums, strict=True))

    return go, min(map(len, sets)), error


class Notes:
    """Rows, written as they come."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def say(self, **row: Any) -> None:
        row = {"at": round(time.perf_counter() - BEGAN, 1)} | row
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        print(json.dumps(row), flush=True)


Job = tuple[str, Any]


def checks() -> dict[str, tuple[Patch, Any, Sequence[Case]]]:
    """Ops as the trials have them, against their references."""
    long = [
        Case(AttentionSpec(32, 8, 128, 0.088), {"S": s, "Q": 1, "KV": n, "block_size": 32})
        for s, n in ((3, 300), (2, 3000))
    ]
    cases = [*ATTENTION.cases(), *long]
    return {
        "splits of 256 keys": (splits(256), ATTENTION, cases),
        "splits of 256 keys, tiles of 32": (splits(256, 32), ATTENTION, cases),
    }


def checked(name: str) -> str:
    patch, op, cases = checks()[name]
    with patch():
        errors = [case_error(backend("triton"), op, case, "float16") for case in cases]
    worst = max(errors)
    return "" if worst <= op.tolerance["float16"] else f"{name} is off: {worst:.2e} of {op.tolerance['float16']:.1e}"


def compiled(job: Job) -> tuple[Job, str]:
    """Fills Triton's cache in a worker and runs what it made; what went wrong."""
    kind, what = job
    try:
        if kind == "kernel":
            name, tile = what
            go, _, _ = kernel(name, tile, 128, True)
            go(0)
            torch.cuda.synchronize()
        elif kind == "check":
            return job, checked(what)
        else:
            path, group_name, place = what
            group = next(g for g in groups(wg.Tiles()) if g.name == group_name)
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


def time_kernels(notes: Notes, until: float, bad: set[str]) -> wg.Tiles:
    """The best tile of each map, where it is right."""
    found: dict[str, tuple[float, wg.Tile]] = {}
    for name, tile in candidates():
        if time.perf_counter() > until:
            break
        if str(("kernel", (name, tile))) in bad:
            continue
        row: dict[str, Any] = {"part": "kernels", "map": name, "tile": [tile.rows, tile.parts, tile.stages]}
        try:
            go, count, error = kernel(name, tile, 128, False)
            for i in range(count):
                go(i)
            torch.cuda.synchronize()
            row["error"] = float(f"{error():.1e}")
            row["us"] = round(triton_batch.timed(go, count) * 1e6, 1)
            row["now"] = NOW[name]
            if row["error"] < WRONG and row["us"] < found.get(name, (1e9, tile))[0]:
                found[name] = row["us"], tile
        except Exception as failure:
            row["raised"] = f"{type(failure).__name__}: {failure}"[:600]
        notes.say(**row)
    # Fewer rows than fill a tile, once: those beyond must not show.
    for name in ("gated", "three", "down"):
        try:
            go, count, error = kernel(name, wg.Tile(parts=1 if name == "gated" else 4), 101, True)
            go(0)
            torch.cuda.synchronize()
            notes.say(part="kernels", map=name, tokens=101, error=float(f"{error():.1e}"))
        except Exception as failure:
            notes.say(part="kernels", map=name, tokens=101, raised=f"{type(failure).__name__}: {failure}"[:300])
    fields = {"gated": "gated", "three": "three", "out": "out", "head": "head", "down": "down"}
    return replace(wg.Tiles(), **{fields[name]: tile for name, (_, tile) in found.items() if name in fields})


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
            if str(("model", (str(path), group.name, place))) in bad:
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
    parser.add_argument("--parts", default="kernels,batch")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--layers", type=int, default=8, help="of Mistral-7B")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--list", action="store_true", help="print what would be done")
    args = parser.parse_args()
    parts, until = args.parts.split(","), BEGAN + args.seconds
    chosen = [g for g in groups(wg.Tiles()) if g.name in parts]
    cuts = {g.name: args.layers for g in chosen}
    if args.list:
        for name, tile in candidates():
            print("kernels", name, tile)
        for group in chosen:
            for trial in group.trials:
                print(group.name, trial.name)
        return 0
    notes = Notes(args.out)
    paths = {g.name: make(g, cuts[g.name], args.folder) for g in chosen}
    for group in chosen:
        make(group, args.layers // 2, args.folder)
    models = [[("model", (str(paths[g.name]), g.name, i)) for i in range(len(g.trials))] for g in chosen]
    # What trials share is compiled by the first of each model, beside the kernels of this file.
    first: list[Job] = [job for jobs in models for job in jobs[:1]]
    first += [("kernel", c) for c in candidates()] if "kernels" in parts else []
    then: list[Job] = [job for jobs in models for job in jobs[1:]] + [("check", name) for name in checks()]
    notes.say(part="files", made=[str(p) for p in paths.values()], jobs=[len(first), len(then)])
    bad: set[str] = set()
    if args.jobs > 1:
        bad = warm(first, args.jobs, BEGAN + args.seconds * 0.35, notes)
        bad |= warm(then, args.jobs, BEGAN + args.seconds * 0.6, notes)
        notes.say(part="compile", bad=sorted(bad))
    notes.say(part="machine", device=backend("triton").device(), torch=torch.__version__)
    best = time_kernels(notes, BEGAN + args.seconds * 0.72, bad) if "kernels" in parts else wg.Tiles()
    notes.say(part="kernels", best=str(best))
    tables = []
    for group in (g for g in groups(best) if g.name in parts):
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
