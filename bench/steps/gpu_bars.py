"""Decode and prefill speed of full-size synthetic models on one GPU: the figures that README and docs/performance.md cite.

    python -m bench.steps.gpu_bars --seconds 80 --out RESULTS.jsonl [--only mistral-7b:Q4_K_M,..] [--tests tg128,pp4096]
        [--vs bench/results/2026-11-23-h200-bars.jsonl] [--jobs 12] [--no-check] [--cut glm-4.7-flash:Q4_K_M=2,..]

Model files are written first, then several processes compile the kernels, then the models are measured one after the other,
the most important first. Every figure is one line of RESULTS.jsonl as soon as it is known; a figure whose check failed says
so. `--vs` prints each speed as a ratio to an earlier record.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.shared import FOLDER, command_line, synthetic
from quarrel.bench.machine import machine
from quarrel.bench.precompile import Job, jobs_for, precompile
from quarrel.bench.report import Figure, earlier, line, table
from quarrel.bench.session import How, Session
from quarrel.bench.workload import Test
from quarrel.ops.registry import backend


@dataclass(frozen=True)
class Model:
    """A model, SHAPE:QUANT, and what is measured of it."""

    name: str
    tests: tuple[Test, ...]


WARM_SHARE = 0.35
"""The share of the time that compiling beforehand may take."""
TG, PP, PP512 = Test("decode", 128), Test("prefill", 4096), Test("prefill", 512)
BATCHES = tuple(Test("decode", 128, 128, n) for n in (8, 32, 128))
MODELS = (
    Model("mistral-7b:Q4_K_M", (TG, PP512, PP, *BATCHES, Test("decode", 64, 32000))),
    Model("mistral-7b:Q8_0", (TG, PP)),
    Model("tinyllama-1.1b:Q4_K_M", (TG, PP)),
    Model("smollm2-135m:F16", (TG,)),
    Model("granite-4-micro:Q4_K_M", (TG, PP)),
    Model("granite-4-h-tiny:Q4_K_M", (TG, PP, *BATCHES)),
    Model("gpt-oss-20b:MXFP4", (TG, PP512, PP, *BATCHES)),
    Model("nemotron-3-nano-30b-a3b:Q4_K_M", (TG, PP, *BATCHES)),
    Model("mixtral-8x7b:Q4_K_M", (TG, PP512, PP, *BATCHES)),
    Model("qwen3.6-35b-a3b:Q4_K_M", (TG, PP, *BATCHES)),
    Model("qwen3.5-9b:Q4_K_M", (TG, PP)),
    Model("gemma-4-26b-a4b:Q4_K_M", (TG, PP)),
    Model("gemma-4-e4b:Q4_K_M", (TG, PP)),
    Model("glm-4.7-flash:Q4_K_M", (TG, PP)),
    Model("lfm2-8b-a1b:Q4_K_M", (TG, PP)),
)
"""In order of importance."""


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=80.0, help="no further test begins after this")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; figures are appended")
    parser.add_argument("--vs", type=Path, help="an earlier file of JSON lines")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the model files go")
    parser.add_argument("--only", default="", help="models by name, SHAPE:QUANT, separated by commas")
    parser.add_argument("--tests", default="", help="tests by name, such as tg128, separated by commas")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile kernels; 1 for none")
    parser.add_argument("--step-tokens", type=int)
    parser.add_argument("--layers", type=int, help="cut the models, to try this program where there is no GPU")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--cut", default="", help="models by name with a number of layers, MODEL=N, separated by commas")
    parser.add_argument("--warm-share", type=float, default=WARM_SHARE, help="the share of --seconds for compiling")
    args = parser.parse_args()
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.2f} s] {text}", flush=True)

    before = earlier(args.vs) if args.vs else {}
    how = How(
        args.compute,
        args.rounds,
        args.step_tokens,
        not args.no_check,
        keep_going=True,
        deadline=began + args.seconds,
        say=say,
    )
    models, cut = chosen(args.only, args.tests), cuts(args.cut)
    ready = written(models, args.folder, {m.name: cut.get(m.name, args.layers) for m in models}, began + args.seconds / 4)
    say(f"{len(ready)} models written: {', '.join(model.name for model in ready)}")
    if args.jobs > 1:
        shares = compile_jobs(ready, args.backend, how, args.jobs)
        seconds = precompile(shares, args.jobs, args.seconds * args.warm_share)
        say(f"kernels compiled in {seconds:.1f} s: {len(shares)} shares, {args.jobs} at a time")
    for model in [model for model in ready if model.name in cut]:
        ready[model].unlink()
    session = Session(backend(args.backend), how)
    say(f"{session.backend.device()}; {machine()}")
    figures: list[Figure] = []
    failed = 0
    with args.out.open("a") as out:
        for model in ready:
            path = synthetic(model.name, args.folder, args.layers)
            try:
                for figure in session.model(str(path), model.tests):
                    figures.append(figure)
                    print(line(figure), file=out, flush=True)
                    say(brief(figure, before.get(figure.key)))
            except Exception:
                failed += 1
                say(f"{model.name} FAILED: {traceback.format_exc(limit=-8)}")
            if cut:
                path.unlink()
            if how.late:
                say("the time is over")
                break
    print(table(figures))
    return 1 if failed else 0


def chosen(only: str, tests: str) -> list[Model]:
    """The models of these names, with the tests of these names; all of them where nothing is named."""
    known = {model.name: model for model in MODELS}
    names = only.split(",") if only else list(known)
    for name in names:
        if name not in known:
            raise SystemExit(f"no model is called {name!r}: use {', '.join(known)}")
    wanted = set(tests.split(",")) if tests else {t.name for model in MODELS for t in model.tests}
    cut = [Model(name, tuple(t for t in known[name].tests if t.name in wanted)) for name in names]
    return [model for model in cut if model.tests]


def cuts(text: str) -> dict[str, int]:
    """How many layers of a model are compiled for, by its name."""
    pairs = [one.rpartition("=") for one in text.split(",") if one]
    for name, _, layers in pairs:
        if not name or not layers.isdigit():
            raise SystemExit(f"--cut has {name or layers!r}, wanted a model and its layers, such as glm-4.7-flash:Q4_K_M=2")
    return {name: int(layers) for name, _, layers in pairs}


def written(models: Iterable[Model], folder: Path, layers: Mapping[str, int | None], until: float) -> dict[Model, Path]:
    """Writes the files one after the other, each with all cores; after `until` no further one is begun."""
    ready: dict[Model, Path] = {}
    for model in models:
        if not ready or time.perf_counter() < until:
            ready[model] = synthetic(model.name, folder, layers[model.name])
    return ready


def compile_jobs(models: Mapping[Model, Path], name: str, how: How, jobs: int) -> list[Job]:
    """One test a process, those of the first models first."""
    rows = how.step_tokens or backend(name).step_tokens
    return [
        job
        for model, path in models.items()
        for job in jobs_for(str(path), name, how.compute, rows, model.tests, how.checked, jobs)
    ]


def brief(figure: Figure, before: float | None) -> str:
    share = f", {100 * figure.share:.1f}% of {figure.read_gb_s:.0f} GB/s" if figure.share else ""
    ratio = f", {figure.speed / before:.3f} of {before:.1f}" if before else ""
    return f"{figure.model} {figure.test}: {figure.speed:.1f} tokens/s{share}{ratio}; warm-up {figure.warm_up_s:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
