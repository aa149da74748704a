"""The speed bars on one GPU: full-size synthetic models made in memory, then figures in order of importance.

    python bench/gpu_bars.py --seconds 80 --out RESULTS.jsonl [--only mistral-7b:Q4_K_M,..] [--jobs 12] [--no-check]

Files are written first, then kernels are compiled by several processes, and the models follow one another. A run that is
cut off keeps what it had: every figure is one line of RESULTS.jsonl. A figure whose check failed says so in its line.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from quarrel.bench.machine import machine  # noqa: E402
from quarrel.bench.report import Figure, line, table  # noqa: E402
from quarrel.bench.session import How, Session  # noqa: E402
from quarrel.bench.warm import Job, jobs_for, warm  # noqa: E402
from quarrel.bench.work import Test  # noqa: E402
from quarrel.ops.registry import backend  # noqa: E402
from quarrel.ops.step import ComputeChoice  # noqa: E402


@dataclass(frozen=True)
class Bar:
    """A model and what is measured of it, with the speed wanted of each."""

    shape: str
    quant: str
    tests: tuple[tuple[Test, float], ...]

    @property
    def name(self) -> str:
        return f"{self.shape}:{self.quant}"

    def file(self, folder: Path) -> Path:
        return folder / f"{self.shape}-{self.quant}.gguf"


WARM_SHARE = 0.35
"""Of the time, what compiling beforehand may take."""
TG, PP, PP512 = Test("decode", 128), Test("prefill", 4096), Test("prefill", 512)
BARS = (
    Bar("mistral-7b", "Q4_K_M", ((TG, 530), (PP512, 15000), (PP, 20000), *((Test("decode", 128, 128, b), want)
        for b, want in ((8, 2000), (32, 6000), (128, 12000))), (Test("decode", 64, 32000), 280))),
    Bar("mistral-7b", "Q8_0", ((TG, 400), (PP, 0))),
    Bar("tinyllama-1.1b", "Q4_K_M", ((TG, 1600), (PP, 0))),
    Bar("smollm2-135m", "F16", ((TG, 2000),)),
    Bar("granite-4-micro", "Q4_K_M", ((TG, 650), (PP, 29000))),
    Bar("granite-4-h-tiny", "Q4_K_M", ((TG, 477), (PP, 20049), *((Test("decode", 128, 128, b), 0) for b in (8, 32)))),
    Bar("gpt-oss-20b", "MXFP4", ((TG, 477), (PP, 16865), *((Test("decode", 128, 128, b), 0) for b in (8, 32)))),
    Bar("nemotron-3-nano-30b-a3b", "Q4_K_M",
        ((TG, 494), (PP, 11540), *((Test("decode", 128, 128, b), 0) for b in (8, 32)))),
    Bar("mixtral-8x7b", "Q4_K_M", ((TG, 270), (PP, 6372))),
)  # fmt: skip
"""In order of importance. 0: no bar stands for it alone."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=80.0, help="no further test begins after this")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; figures are appended")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the model files go")
    parser.add_argument("--only", default="", help="bars by name, SHAPE:QUANT, separated by commas")
    parser.add_argument("--tests", default="", help="tests by name, such as tg128, separated by commas")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile kernels; 1 for none")
    parser.add_argument("--step-tokens", type=int)
    parser.add_argument("--layers", type=int, help="cut the models, to try this program where there is no GPU")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.2f} s] {text}", flush=True)

    bars = _chosen(args.only, args.tests)
    deadline = began + args.seconds
    how = How(args.compute, args.rounds, args.step_tokens, not args.no_check, despite=True, deadline=deadline, say=say)
    args.folder.mkdir(parents=True, exist_ok=True)
    ready = _make(bars, args.folder, args.layers, began + args.seconds / 4)
    say(f"{len(ready)} of {len(bars)} models written: {', '.join(b.name for b in ready)}")
    if args.jobs > 1:
        shares = _shares(ready, args.folder, args.backend, how, args.jobs)
        seconds = warm(shares, args.jobs, args.seconds * WARM_SHARE)
        say(f"kernels compiled in {seconds:.1f} s: {len(shares)} shares, {args.jobs} at a time")
    session = Session(backend(args.backend), how)
    say(f"{session.backend.device()}; {machine()}")
    figures: list[Figure] = []
    failed = 0
    with args.out.open("a") as out:
        for bar in ready:
            wanted = {test.name: speed for test, speed in bar.tests}
            try:
                for figure in session.model(str(bar.file(args.folder)), [test for test, _ in bar.tests]):
                    figures.append(figure)
                    print(line(figure), file=out, flush=True)
                    say(_verdict(figure, wanted[figure.test]))
            except Exception:
                failed += 1
                say(f"{bar.name} FAILED: {traceback.format_exc(limit=-8)}")
            if how.late:
                say("the time is over")
                break
    print(table(figures))
    return 1 if failed else 0


def _chosen(only: str, tests: str) -> list[Bar]:
    names = [b.name for b in BARS]
    wanted = only.split(",") if only else names
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise SystemExit(f"no bar is called {unknown[0]!r}: use {', '.join(names)}")
    kept = [
        Bar(b.shape, b.quant, tuple(t for t in b.tests if not tests or t[0].name in tests.split(",")))
        for b in (next(b for b in BARS if b.name == name) for name in wanted)
    ]
    return [b for b in kept if b.tests]


def _make(bars: list[Bar], folder: Path, layers: int | None, until: float) -> list[Bar]:
    """Writes the files one after the other, each with all cores; what is not begun in time is left out."""
    ready = []
    for bar in bars:
        if not bar.file(folder).exists():
            if ready and time.perf_counter() > until:
                continue
            cut = [] if layers is None else ["--layers", str(layers)]
            command = [sys.executable, "-m", "tools.make_synthetic", bar.shape, bar.quant, str(bar.file(folder)), *cut]
            subprocess.run(command, cwd=ROOT, check=True)
        ready.append(bar)
    return ready


def _shares(bars: list[Bar], folder: Path, name: str, how: How, jobs: int) -> list[Job]:
    """One test a process, those of the first bars first."""
    compute: ComputeChoice = how.compute
    return [
        job
        for bar in bars
        for job in jobs_for(
            str(bar.file(folder)),
            name,
            compute,
            how.step_tokens or backend(name).step_tokens,
            [t for t, _ in bar.tests],
            how.checked,
            jobs,
        )
    ]


def _verdict(figure: Figure, wanted: float) -> str:
    bar = (
        f", the bar is {wanted:g}: {'met' if figure.speed >= wanted else 'MISSED'} ({figure.speed / wanted:.2f})"
        if wanted
        else ""
    )
    share = f", {100 * figure.share:.1f} % of {figure.read_gb_s:.0f} GB/s" if figure.share else ""
    return f"{figure.model} {figure.test}: {figure.speed:.1f} tok/s{share}{bar}; warm-up {figure.warm_up_s:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
