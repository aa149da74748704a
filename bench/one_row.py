"""Tiles of one row in whole steps: every map of a model cut in other ways, one at a time, then the best of each at once.

    python bench/one_row.py --out one-row.jsonl [--seconds 140] [--models tinyllama,mistral,..] [--jobs 14] [--list]

A trial is the backend with another tile for one map (`few_tiles.py`). All trials of a model share its packed weights; their
logits are compared with those of the backend as it is, and all are timed in turns, medians of 5. Large models are cut to
some layers, and what a whole one would do is worked out from half as many. A line of JSON each as it comes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import one_row_kernels
from notes import Notes
from prep import replaced

from quarrel.bench.measure import run
from quarrel.bench.subject import Source, Subject, limits_for
from quarrel.bench.work import Test
from quarrel.gguf import GGUFFile
from quarrel.ops.attention import AttentionSpec
from quarrel.ops.linear import LinearSpec, NormGateUpSpec
from quarrel.ops.registry import backend
from quarrel.triton_backend import attention, few, few_tiles
from quarrel.triton_backend import backend as triton_backend
from quarrel.triton_backend.few_tiles import Tile, Walk
from quarrel.triton_backend.inputs import live_counts
from quarrel.triton_backend.runtime import INTERPRETED
from quarrel.triton_backend.weights import Weights

ROOT = Path(__file__).resolve().parents[1]
BEGAN = time.perf_counter()
ROUNDS = 5
STEP_TOKENS = 64
GAIN = 0.002
"""Share of a step below which a trial is no better than the tile in force."""


@dataclass(frozen=True)
class Capped(Tile):
    """A thread has at most so many registers."""

    registers: int = 64


@dataclass(frozen=True)
class Keys:
    """Of a tile of attention."""

    keys: int
    warps: int


@dataclass(frozen=True)
class Without:
    """The map left out, to see what it is worth."""

    map: str


@dataclass(frozen=True)
class Inside:
    """Gate and up halve their rows themselves (`one_row_kernels.py`), in programs of this tile."""

    tile: Tile


Way = Tile | Walk | Keys | Without | Inside


def deep(rows: int, words: int, warps: int) -> Tile:
    return Tile(rows, words, warps, True)


def capped(rows: int, words: int, warps: int, registers: int) -> Capped:
    return Capped(rows, words, warps, False, registers)


PARTS = ("gate", "down", "qkv", "o", "head", "attend", "norm", "halve")
ATTEND = (Keys(32, 4), Keys(64, 2), Keys(32, 2), Keys(64, 8), Keys(32, 1), Keys(128, 8), Keys(16, 2), Keys(128, 4))


@dataclass(frozen=True)
class Model:
    """Widths, the layers it is cut to, the speed wanted of the whole, and other ways of its maps, by map."""

    shape: str
    quant: str
    layers: int
    cut: int
    bar: float
    embedding: int
    inner: int
    three: int
    """Outputs of query, key and value."""
    vocab: int
    ways: dict[str, tuple[Way, ...]]
    inside: tuple[Inside, ...] = ()

    def file(self, folder: Path, cut: int) -> Path:
        return folder / f"{self.shape}-{self.quant}-{cut}.gguf"

    def map(self, n: int, k: int) -> str:
        """Its name, by its widths."""
        e = self.embedding
        return {(self.three, e): "qkv", (e, e): "o", (e, self.inner): "down", (self.vocab, e): "head"}.get((n, k), "")

    def has(self, map: str, spec: Any) -> bool:
        """Whether a node of this spec is the map."""
        if isinstance(spec, NormGateUpSpec):
            return map in ("gate", "inside")
        if isinstance(spec, AttentionSpec):
            return map == "attend"
        linears = getattr(spec, "linears", (getattr(spec, "linear", spec),))
        whole = all(isinstance(lin, LinearSpec) for lin in linears)
        return whole and self.map(sum(lin.n for lin in linears), linears[0].k) == map

    def trials(self, maps: Collection[str] = ()) -> list[tuple[str, Way]]:
        """The first of each map first: time may be over before the last."""
        left_out = tuple(Without(part) for part in PARTS)
        known = self.ways | {"attend": ATTEND, "without": left_out, "inside": self.inside}  # type: ignore[operator]
        chosen = {name: ways for name, ways in known.items() if not maps or name in maps}
        most = max(map(len, chosen.values()))
        return [(name, ways[i]) for i in range(most) for name, ways in chosen.items() if i < len(ways)]


MODELS = {
    "tinyllama": Model(
        "tinyllama-1.1b", "Q4_K_M", 22, 22, 1600, 2048, 5632, 2560, 32000,
        {
            "gate": (Tile(4, 256, 4), Tile(8, 256, 4), capped(4, 256, 2, 64), Tile(4, 64, 1), Tile(4, 128, 2),
                     Tile(2, 256, 4)),
            "down": (deep(2, 256, 4), deep(4, 256, 4), Tile(4, 512, 4), Tile(1, 128, 1), deep(2, 512, 8),
                     Tile(1, 1024, 8)),
            "qkv": (Tile(4, 256, 4), Tile(2, 256, 4), Tile(8, 256, 4), Tile(4, 128, 2)),
            "o": (Tile(4, 256, 4), Tile(2, 256, 4), Tile(8, 256, 4), Tile(4, 128, 2)),
            "head": (Tile(8, 256, 4), Tile(4, 256, 4), Tile(4, 64, 1), Tile(8, 128, 2), Tile(4, 128, 1)),
        },
        (Inside(Tile(4, 256, 2)), Inside(Tile(8, 256, 4))),
    ),
    "mistral": Model(
        "mistral-7b", "Q4_K_M", 32, 8, 530, 4096, 14336, 6144, 32768,
        {
            "gate": (capped(2, 128, 1, 64), Tile(4, 128, 2), Tile(1, 128, 1), Tile(4, 64, 1), Tile(2, 128, 2),
                     Tile(2, 64, 1),
                     Tile(4, 256, 4), capped(2, 128, 1, 56), Tile(2, 256, 4), Tile(8, 128, 4), capped(2, 256, 2, 64)),
            "down": (Tile(4, 256, 2), Tile(1, 128, 1), Tile(4, 256, 4), Tile(2, 128, 1), Tile(2, 256, 4), Tile(2, 512, 4),
                     Tile(1, 256, 2), Tile(4, 128, 2), Tile(8, 256, 4)),
            "qkv": (Tile(4, 128, 1), Tile(1, 128, 1), Tile(2, 256, 2), Tile(4, 256, 2), Tile(4, 64, 1), Tile(4, 128, 2),
                    Tile(4, 256, 4)),
            "o": (Tile(2, 128, 1), Tile(4, 256, 2), Tile(1, 128, 1), Tile(2, 256, 2), Tile(4, 256, 4), Tile(4, 512, 8)),
            "head": (Tile(8, 256, 4), Tile(4, 64, 1), Tile(4, 256, 4), Tile(8, 128, 2)),
        },
        (Inside(Tile(2, 128, 1)), Inside(Tile(4, 512, 4))),
    ),
    "q8": Model(
        "mistral-7b", "Q8_0", 32, 8, 400, 4096, 14336, 6144, 32768,
        {
            "gate": (Tile(8, 512, 4), capped(4, 512, 4, 80), Tile(4, 256, 2), Tile(4, 512, 8), Tile(8, 512, 8),
                     Tile(4, 1024, 8),
                     Tile(8, 256, 4), capped(4, 512, 4, 64)),
            "down": (Tile(4, 256, 2), Tile(4, 512, 8), Tile(8, 512, 8), Tile(4, 256, 4), Tile(8, 256, 4),
                     Tile(4, 128, 1)),
            "qkv": (Tile(8, 512, 4), Tile(4, 256, 2), Tile(4, 512, 8), Tile(4, 256, 4)),
            "o": (Tile(8, 512, 4), Tile(4, 256, 2), Tile(4, 512, 8), Tile(4, 256, 4)),
            "head": (Tile(4, 256, 2), Tile(8, 512, 8)),
        },
        (Inside(Tile(4, 512, 4)),),
    ),
    "granite": Model(
        "granite-4-micro", "Q4_K_M", 40, 10, 650, 2560, 8192, 3584, 100352,
        {
            "gate": (Tile(4, 128, 1), Tile(1, 128, 1), Tile(4, 128, 2), Tile(8, 64, 1), Tile(2, 256, 2),
                     capped(2, 128, 1, 64),
                     Tile(8, 64, 2), Tile(4, 256, 2), Tile(2, 512, 4), Tile(4, 256, 4)),
            "down": (deep(4, 512, 4), Tile(2, 512, 4), Tile(8, 512, 4), Tile(2, 256, 2), Tile(4, 256, 2),
                     Tile(4, 1024, 8),
                     Tile(4, 512, 8)),
            "qkv": (Tile(2, 128, 1), Tile(4, 64, 1), Tile(8, 512, 4), Tile(4, 128, 1), Tile(4, 512, 8), Tile(4, 256, 2)),
            "o": (Tile(2, 128, 1), Tile(4, 64, 1), Tile(8, 512, 4), Tile(2, 512, 4), Tile(4, 512, 8), Tile(4, 256, 2)),
            "head": (Tile(8, 64, 1), Tile(8, 64, 2), Tile(4, 128, 1), Tile(16, 64, 4), Tile(4, 256, 2)),
        },
        (Inside(Tile(2, 128, 1)), Inside(Tile(8, 64, 1))),
    ),
    "smollm": Model(
        "smollm2-135m", "F16", 30, 30, 2000, 576, 1536, 960, 49152,
        {
            "gate": (Walk(2, 1024, 4, 8), Walk(1, 1024, 4, 12), Walk(2, 1024, 2, 12), Walk(4, 1024, 4, 4),
                     Walk(2, 1024, 2, 6),
                     Walk(2, 1024, 4, 7)),
            "down": (Tile(1, 2048, 4), Tile(2, 2048, 4), Tile(4, 2048, 8), Tile(1, 2048, 16)),
            "qkv": (Tile(2, 1024, 2), Tile(1, 1024, 2), Tile(4, 1024, 8), Tile(2, 1024, 8)),
            "o": (Tile(1, 1024, 2), Tile(2, 1024, 2), Tile(2, 1024, 4), Tile(1, 1024, 8)),
            "head": (Tile(8, 256, 4), Tile(8, 256, 2), Tile(16, 256, 4), Tile(16, 1024, 8), Tile(8, 1024, 8)),
        },
    ),
}  # fmt: skip
"""What was tried before stands in docs/kernel-log.md."""


@contextmanager
def tried(model: Model, ways: Mapping[str, Way]) -> Iterator[None]:
    """The backend with these ways."""
    before = few_tiles.tile_for

    def tile(format: str, n: int, k: int) -> Any:
        return ways.get(model.map(n, k)) or before(format, n, k)

    given: list[tuple[Any, str, Any]] = [(few_tiles, "tile_for", tile), (few, "tile_for", tile)]
    gate = ways.get("gate")
    if gate is not None:
        given.append((few, "walk_for", lambda *_: gate if isinstance(gate, Walk) else None))
        given.append((few, "gate_tile_for", lambda *_: gate))
        if isinstance(gate, Capped):
            given.append((few, "gate_up", Kernel(few.gate_up, gate.registers)))
    if "inside" in ways:
        inside: Any = ways["inside"]
        given.append((few, "gate_tile_for", lambda *_: inside.tile))
        given.append((few, "_gate_up", one_row_kernels.gate_up_inside))
        given.append((few, "halve_rows", Skipping(None, lambda *_, **__: True)))
    if "without" in ways:
        given += absent(model, ways["without"])
    if "attend" in ways:
        given.append((attention, "tiles", tiled(ways["attend"])))
    with replaced(*given):
        yield


def tiled(way: Any) -> Callable[..., Any]:
    """`attention.tiles` with another tile for one new token."""
    before = attention.tiles

    def tiles(*given: Any) -> Any:
        one, many = before(*given)
        return replace(one, keys=way.keys, warps=way.warps), many

    return tiles


def absent(model: Model, way: Any) -> list[tuple[Any, str, Any]]:
    """The kernels of a part, which do nothing."""
    nothing = Skipping(None, lambda *given, **named: True)
    one = Skipping(few.matvec, lambda *given, **named: model.map(given[9], named["K"]) == way.map)
    return {
        "gate": [(few, "gate_up", nothing), (few, "stream_gate_up", nothing)],
        "qkv": [(few, "matvec3", nothing)],
        "attend": [(attention, "attend_one", nothing)],
        "norm": [(few, "norm_halve_rows", nothing)],
        "halve": [(few, "halve_rows", nothing)],
    }.get(way.map, [(few, "matvec", one)])


class Skipping:
    """A kernel that some calls do not launch."""

    def __init__(self, kernel: Any, skips: Callable[..., bool]) -> None:
        self._kernel, self._skips = kernel, skips

    def run(self, *given: Any, **named: Any) -> Any:
        return None if self._skips(*given, **named) else self._kernel.run(*given, **named)


class Kernel:
    """A kernel that is compiled for fewer registers."""

    def __init__(self, kernel: Any, registers: int) -> None:
        self._kernel, self._registers = kernel, registers

    def run(self, *given: Any, **named: Any) -> Any:
        return self._kernel.run(*given, maxnreg=self._registers, **named)


class Loaded:
    """A file whose weights are packed once, however often it is built."""

    def __init__(self, path: Path, test: Test, cut: bool) -> None:
        self.test, self._file = test, GGUFFile.open([str(path)])
        self._source = Source.of(self._file, test.length)
        if cut:
            self._source = self._source.cut()[0]
        self._held: Weights | None = None

    def subject(self) -> Subject:
        limits = limits_for([self.test], STEP_TOKENS, False)
        with replaced((triton_backend, "Weights", self._weights)):
            return Subject(self._source, backend("triton"), limits, "auto")

    def _weights(self, *given: Any) -> Weights:
        self._held = self._held or Weights(*given)
        return self._held

    def close(self) -> None:
        self._held = None
        self._file.close()


def once(subject: Subject, test: Test) -> float:
    """Seconds of a step."""
    layout, began = subject.layout, time.perf_counter()
    run(subject, (layout.decode(test.depth + i, 1, from_last=i > 0) for i in range(test.tokens)))
    return (time.perf_counter() - began) / test.tokens


@cache
def loaded(path: Path, test: Test) -> Loaded:
    """A worker's."""
    return Loaded(path, test, cut=True)


def launched(model: Model, map: str, subject: Subject, depth: int) -> None:
    """Only what a trial of this map changes: the rest is compiled by the model's first job, once."""
    plan, inputs = subject.step._plan, subject.layout.decode(depth, 1, False)  # type: ignore[attr-defined]
    live = live_counts(inputs.query_start, inputs.kv_len, 1)
    subject.step._inputs.send(inputs, 1)  # type: ignore[attr-defined]
    count = 0
    for choice, go in zip(plan.choices, plan.launches, strict=True):
        if model.has(map, choice.node.spec):
            go(live)
            count += 1
    assert count, f"{model.shape} has no {map}"
    if not INTERPRETED:
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Job:
    """A trial to compile; without a map, the backend as it is."""

    model: str
    map: str
    way: Way | None
    path: Path
    test: Test


def compiled(job: Job) -> tuple[Job, str]:
    """Fills Triton's cache in a worker and runs what it made; what went wrong."""
    model, depth = MODELS[job.model], job.test.depth
    try:
        with tried(model, {} if job.way is None else {job.map: job.way}):
            subject = loaded(job.path, job.test).subject()
            if job.way is None:
                for want in ("logits", "tokens"):
                    subject.step(subject.layout.decode(depth, 1, False), want)  # type: ignore[arg-type]
                run(subject, [subject.layout.decode(job.test.length - 1, 1, True)])
            else:
                launched(model, job.map, subject, depth)
            subject.close()
    except Exception:
        return job, traceback.format_exc(limit=-4)[-1200:]
    return job, ""


def warm(jobs: list[Job], processes: int, until: float, notes: Notes) -> set[Job]:
    """The jobs that failed or were not done in time: nothing of theirs is run here, where a fault would end it all."""
    left = set(jobs)
    with multiprocessing.get_context("spawn").Pool(min(processes, len(jobs))) as pool:
        waiting = pool.imap_unordered(compiled, jobs)
        try:
            for _ in jobs:
                job, fault = waiting.next(max(0.1, until - time.perf_counter()))
                if fault:
                    notes.say(model=job.model, trial=f"{job.map} {shown(job.way)}", fault=fault)
                else:
                    left.discard(job)
        except multiprocessing.TimeoutError:
            notes.say(part="compile", over=True, left=len(left))
        pool.terminate()
    return left


@dataclass(eq=False)
class Trial:
    """One that is loaded, and its times."""

    name: str
    way: Way | None
    ways: dict[str, Way]
    subject: Subject
    off: float
    right: bool
    seconds: list[float]

    @property
    def ms(self) -> float:
        return median(self.seconds) * 1e3


class Trials:
    """All of a model that are loaded."""

    def __init__(self, model: Model, held: Loaded, notes: Notes) -> None:
        self.model, self.held, self.notes = model, held, notes
        self.all: list[Trial] = []
        self._want: np.ndarray | None = None

    def add(self, name: str, way: Way | None, ways: dict[str, Way]) -> Trial | None:
        try:
            with tried(self.model, ways):
                subject = self.held.subject()
                layout = subject.layout
                for _ in range(2):  # plain, then the graph
                    got = subject.step(layout.decode(self.held.test.depth, 1, False), "logits").logits
                assert got is not None
                self._want = got if self._want is None else self._want
                off = float(np.linalg.norm(got - self._want) / np.linalg.norm(self._want))
                drawn = subject.step(layout.decode(self.held.test.depth, 1, False), "tokens").tokens
                once(subject, self.held.test)
        except Exception as failure:
            self.notes.say(model=self.model.shape, trial=name, raised=f"{type(failure).__name__}: {failure}"[:500])
            return None
        made = Trial(name, way, ways, subject, off, bool((drawn == got.argmax(-1)).all()), [])
        self.all.append(made)
        return made

    def time(self, chosen: list[Trial], until: float) -> None:
        for i in range(ROUNDS):
            if i and time.perf_counter() > until:
                return
            for trial in chosen[:: 1 if i % 2 == 0 else -1]:
                with tried(self.model, trial.ways):
                    trial.seconds.append(once(trial.subject, self.held.test))

    def say(self, chosen: list[Trial]) -> None:
        for t in chosen:
            way = None if t.way is None else asdict(t.way)
            self.notes.say(
                model=f"{self.model.shape} {self.model.quant}", map=t.name, way=way, ms=round(t.ms, 4), off=t.off,
                right=t.right, rounds=len(t.seconds), spread=round(max(t.seconds) / min(t.seconds) - 1, 4),
            )  # fmt: skip


def shown(way: Way | None) -> str:
    if isinstance(way, Walk):
        return f"walk {way.rows} x {way.words}, {way.warps} warps, {way.each} a multiprocessor"
    if isinstance(way, Tile):
        more = f", {way.registers} registers" if isinstance(way, Capped) else ", two ahead" if way.deep else ""
        return f"{way.rows} x {way.words}, {way.warps} warps{more}"
    if isinstance(way, Keys):
        return f"{way.keys} keys, {way.warps} warps"
    if isinstance(way, Inside):
        return shown(way.tile)
    return "" if way is None else way.map


def line(t: Trial, now: float) -> str:
    wrong = "" if t.right and t.off < 2e-2 else "  WRONG?"
    return f"{t.name:6s} {shown(t.way):44s} {t.ms:8.4f} {t.ms / now - 1:+7.2%} {t.off:8.1e}{wrong}"


def best_of(trials: list[Trial], now: float) -> dict[str, Way]:
    """The fastest of each map, where it is faster than the backend as it is, and right."""
    found: dict[str, Trial] = {}
    for t in trials:
        wins = t.name != "without" and t.right and t.off < 2e-3 and t.ms < now * (1 - GAIN)
        if wins and (t.name not in found or t.ms < found[t.name].ms):
            found[t.name] = t
    return {name: t.way for name, t in found.items() if t.way is not None}


def measured(name: str, folder: Path, jobs: list[Job], until: float, notes: Notes) -> str:
    """All trials of a model, and its table."""
    model, test = MODELS[name], jobs[0].test
    held = Loaded(model.file(folder, model.cut), test, cut=False)
    trials = Trials(model, held, notes)
    now = trials.add("now", None, {})
    assert now is not None
    again = until - 3.0
    for job in jobs[1:]:
        if time.perf_counter() > until - 6.0:
            break
        trials.add(job.map, job.way, {job.map: job.way})  # type: ignore[dict-item]
    first = list(trials.all)
    trials.time(first, again)
    trials.say(first)
    best = best_of(first[1:], now.ms)
    rows, then = [line(t, now.ms) for t in sorted(first, key=lambda t: (t.name, t.ms))], now
    if best:
        made = trials.add("best", None, best)
        if made is not None:
            now.seconds.clear()
            trials.time([now, made], until)
            trials.say([now, made])
            rows.append(f"best of each, with it now {now.ms:.4f}: {made.ms:.4f} {made.ms / now.ms - 1:+.2%} {made.off:.1e}")
            rows.append("  " + "; ".join(f"{map}: {shown(way)}" for map, way in best.items()))
            then = made
    rows.append(f"the graph alone {replayed(then.subject):.4f}")
    layer = 0.0
    if model.cut < model.layers:
        half = _half(model, folder, test, notes)
        layer = (now.ms - half) / (model.cut - model.cut // 2)
    for t in dict.fromkeys((now, then)):
        whole = 1e3 / (t.ms + max(0.0, layer + (t.ms - now.ms) / model.cut) * (model.layers - model.cut))
        rows.append(f"{t.name}: {t.ms:.4f} ms, {layer * 1e3:.2f} us a layer now; {whole:.1f} tok/s, bar {model.bar:g}")
    for t in trials.all:
        t.subject.close()
    held.close()
    title = f"\n{name}: {model.shape} {model.quant}, {test.name}, {model.cut} of {model.layers} layers"
    return "\n".join([title, *rows])


def replayed(subject: Subject) -> float:
    """Milliseconds of a step's graph, again and again with nothing between."""
    graphs = [g for key, g in subject.step._graphs.items() if key[-1] == "tokens"]  # type: ignore[attr-defined]
    if not graphs:
        return float("nan")
    for times in (5, 100):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            for go in graphs[-1]:
                go()
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / 100 * 1e3


def _half(model: Model, folder: Path, test: Test, notes: Notes) -> float:
    """Milliseconds of half the layers."""
    held = Loaded(model.file(folder, model.cut // 2), test, cut=False)
    trials = Trials(model, held, notes)
    made = trials.add("half", None, {})
    if made is not None:
        trials.time([made], time.perf_counter() + 1.0)
        made.subject.close()
    held.close()
    return made.ms if made is not None else 0.0


def make(model: Model, cut: int, folder: Path, jobs: int) -> subprocess.Popen[bytes] | None:
    path = model.file(folder, cut)
    if path.exists():
        return None
    command = [sys.executable, "-m", "tools.make_synthetic", model.shape, model.quant, str(path), "--layers", str(cut)]
    return subprocess.Popen([*command, "--jobs", str(jobs)], cwd=ROOT, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("one-row.jsonl"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence that is timed")
    parser.add_argument("--start", type=int, default=0, help="tokens before those; the cache is as it was allocated")
    parser.add_argument("--maps", default="", help="only these, of gate, down, qkv, o, head, attend, inside, without")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--list", action="store_true", help="print what would be done")
    args = parser.parse_args()
    names, until = args.models.split(","), BEGAN + args.seconds
    if args.list:
        for name in names:
            for each, way in MODELS[name].trials():
                print(name, each, shown(way))
        return 0
    notes = Notes(args.out, BEGAN, lambda row: "fault" in row or "raised" in row or "part" in row)
    chosen = [MODELS[name] for name in names]
    files = [(m, cut) for m in chosen for cut in dict.fromkeys((m.cut, m.cut // 2 if m.cut < m.layers else m.cut))]
    making = [make(m, cut, args.folder, max(1, args.jobs // 3)) for m, cut in files]
    if any(process is not None and process.wait() for process in making):
        raise SystemExit("a model could not be written")
    test, maps = Test("decode", args.tokens, args.start), [m for m in args.maps.split(",") if m]
    jobs = {n: [Job(n, "", None, MODELS[n].file(args.folder, MODELS[n].cut), test)] for n in names}
    for n, made in jobs.items():
        made += [replace(made[0], map=map, way=way) for map, way in MODELS[n].trials(maps)]
    order = [made[i] for i in range(max(map(len, jobs.values()))) for made in jobs.values() if i < len(made)]
    notes.say(part="files", jobs=len(order))
    bad: set[Job] = set()
    if args.jobs > 1:
        bad = warm([job for job in order if job.map != "without"], args.jobs, BEGAN + args.seconds * 0.55, notes)
    notes.say(part="compile", bad=[f"{job.model} {job.map} {shown(job.way)}" for job in order if job in bad])
    notes.say(part="machine", device=backend("triton").device())
    tables = []
    for i, name in enumerate(names):
        share = (until - time.perf_counter()) / (len(names) - i)
        usable = [job for job in jobs[name] if job.way is None or job not in bad]
        try:
            tables.append(measured(name, args.folder, usable, time.perf_counter() + share, notes))
        except Exception:
            tables.append(f"{name} FAILED: {traceback.format_exc(limit=-6)}")
        print(tables[-1], flush=True)
    notes.say(part="end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
